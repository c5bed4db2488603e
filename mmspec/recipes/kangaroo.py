"""Kangaroo: the target's first layers and a small adapter draft, until they are unsure.

Liu et al. 2024, "Kangaroo: lossless self-speculative decoding via double early exiting". Two layers
of the target run on its own memory, an attention behind them
(`mmspec.models.heads.kangaroo.KangarooAdapter`, trained by
`mmspec.training.kangaroo.KANGAROO`) and the target's output head say the next token; a draft
ends behind 6 tokens, or where the best token has less than 0.6. Exact: greedy and sampled output is
plain decoding's, also on ragged batches. Reconstructed: the target verifies a draft from its first
layer on, and does not take the early states over; a draft ends before the token that it is unsure
of, not behind it; coupled noise for sampling.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Confidence
from mmspec.drafters.neural.kangaroo import KANGAROO_ADAPTER, shallow_layers
from mmspec.drafters.neural.multi_token import SEES
from mmspec.recipe import Recipe
from mmspec.training.kangaroo import KANGAROO
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=shallow_layers,
    execution=Chain(Confidence(threshold=0.6, most=6)),
    verifier=Coupled(),
    optimisation="cross entropy against the target's distributions",
    sees=SEES,
    draft_model=(KANGAROO_ADAPTER,),
    training=KANGAROO,
    paper="Liu et al. 2024",
    reconstructed="verified from the first layer on; where a draft ends; coupled sampling",
)
