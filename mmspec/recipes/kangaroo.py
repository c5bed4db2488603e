"""Kangaroo: the target's first layers and a small adapter draft until their confidence is low.

Liu et al. 2024, "Kangaroo: lossless self-speculative decoding via double early exiting". Two layers
of the target run on its own cache; an attention layer after them
(`mmspec.models.heads.kangaroo.KangarooAdapter`, trained by `mmspec.training.kangaroo.KANGAROO`) and
the target's output head predict the next token; a draft ends after 6 tokens, or if the best token
has less than 0.6. Exact: greedy and sampled output is plain decoding's, also on ragged batches.
Reconstructed: the target verifies a draft from its first layer on, without reusing the early
states; a draft ends before the token of low confidence, not after it; coupled noise for sampling.
"""

from mmspec.drafters.lengths.length import Confidence
from mmspec.drafters.neural.kangaroo import KANGAROO_ADAPTER, shallow_layers
from mmspec.drafters.neural.multi_token import SEES
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.training.kangaroo import KANGAROO
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=shallow_layers,
    execution=Chain(Confidence(threshold=0.6, max_length=6)),
    verifier=Coupled(),
    optimisation="cross entropy against the target's distributions",
    sees=SEES,
    draft_model=(KANGAROO_ADAPTER,),
    training=KANGAROO,
    paper="Liu et al. 2024",
    reconstructed="verified from the first layer on; where a draft ends; coupled sampling",
)
