"""SVIP: draft on while the drafter is sure of itself, by the entropy of its law.

Zhang et al. 2024. Draft while sqrt(c H(q)) <= h, decided before each draw, so the output stays
exact. AdaEDL (Agrawal et al. 2024) is the same predicate with its bound adapted to a wanted
acceptance.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Entropy
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=small_model,
    execution=Chain(Entropy(most=8)),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Zhang et al. 2024",
)
