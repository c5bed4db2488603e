"""AASD: one layer reads the target's keys and values, those of images projected to few slots.

Yang et al. 2025, "AASD: accelerate inference by aligning speculative decoding in multimodal large
language models". The drafter is a `mmspec.models.heads.aasd.AasdHead`: it attends to the target's
keys and values for the verified prefix and to its own for drafted tokens; a learned projection
along the token axis leaves 64 slots per image. Trained by `mmspec.training.aasd.train_aasd` with
the same mixture of keys. Exact, with any head. Reconstructed from the abstract: the layer and its
inputs, the target layer it uses, chains of 5, the number of slots, the loss; coupled noise instead
of rejection.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.aasd import AASD_HEAD, kv_head
from mmspec.drafters.neural.multi_token import SEES
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.training.aasd import AASD
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=kv_head,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    optimisation="the target's distributions, with a mixture of its keys and own ones",
    sees=SEES,
    draft_model=(AASD_HEAD,),
    training=AASD,
    needs=("image input",),
    paper="Yang et al. 2025",
    reconstructed="the layer and its place, length, slots and loss; coupled noise",
)
