"""AASD: one layer over the target's own keys and values, those of pictures projected to few.

Yang et al. 2025, "AASD: accelerate inference by aligning speculative decoding in multimodal large
language models". The drafter is a `mmspec.models.heads.aasd.AasdHead`: of what the target has read
it attends to the target's keys and values, of what was drafted since to its own; a learned
projection along the token axis leaves 64 slots of a picture. Trained by
`mmspec.training.aasd.learn_aasd` with the same mixture of keys. Exact, with any head.
Reconstructed from the abstract: the layer and what it reads, which layer of the target it stands
on, chains of 5, the number of slots, the loss; coupled noise in the place of rejection.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.aasd import AASD_HEAD, kv_head
from mmspec.drafters.neural.multi_token import SEES
from mmspec.recipe import Recipe
from mmspec.training.aasd import AASD
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=kv_head,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    optimisation="the target's distributions, by its keys for what is read and own ones for what is drafted",
    sees=SEES,
    draft_model=(AASD_HEAD,),
    training=AASD,
    paper="Yang et al. 2025",
    reconstructed="the layer and its place, length, slots and loss; coupled noise",
)
