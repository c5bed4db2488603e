"""FastVLM: a quarter of the target's layers drafts, through a network that imitates the rest.

Bajpai and Hanawal 2025, "FastVLM: self-speculative decoding for fast vision-language model
inference". The imitation network stands behind the exit, and is taught what the whole target says
and the states that it says it of (`mmspec.training.kangaroo.FASTVLM`). Exact: the whole
target verifies, where the paper tells of a small loss. Reconstructed: the network is Kangaroo's
adapter, which has a norm of its own; the exit, 5 tokens, the threshold and the weights of the loss;
the target verifies from its first layer on; coupled noise for sampling.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Confidence
from mmspec.drafters.neural.kangaroo import KANGAROO_ADAPTER, shallow_layers
from mmspec.drafters.neural.multi_token import SEES
from mmspec.recipe import Recipe
from mmspec.training.kangaroo import FASTVLM
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=shallow_layers,
    execution=Chain(Confidence(threshold=0.4, most=5)),
    verifier=Coupled(),
    optimisation="imitation of the target's last states, laws and tokens",
    sees=SEES,
    draft_model=(KANGAROO_ADAPTER,),
    training=FASTVLM,
    paper="Bajpai and Hanawal 2025",
    reconstructed="network, exit, length, threshold and loss; coupled sampling",
)
