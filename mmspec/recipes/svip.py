"""SVIP: draft on while the drafter is sure of itself, by the entropy of its distribution.

Zhang et al. 2024. Draft while sqrt(c H(q)) <= h, decided before each draw, so the output stays
exact. AdaEDL (Agrawal et al. 2024) is the same predicate with its bound adapted to a wanted
acceptance.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Entropy
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.verifiers.coupled import Coupled

RECIPE = with_draft_model(
    execution=Chain(Entropy(most=8)),
    verifier=Coupled(),
    paper="Zhang et al. 2024",
)
