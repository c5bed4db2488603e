"""SVIP: draft while the entropy of the draft distribution is low.

Zhang et al. 2024. Draft while sqrt(c H(q)) <= h, decided before each draw, so the output stays
exact. AdaEDL (Agrawal et al. 2024) is the same predicate with its bound adapted to a target
acceptance.
"""

from mmspec.drafters.lengths.length import Entropy
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_draft_model(
    execution=Chain(Entropy(max_length=8)),
    verifier=Coupled(),
    paper="Zhang et al. 2024",
)
