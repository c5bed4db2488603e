"""Polybasic: a chain of models of falling size, each of which verifies drafts of the next one.

Wang et al. 2025. `models` are the models below `drafter`, from large to small; without any, the
innermost level is a search in the text. `length` counts tokens of the target's draft, `lengths`
those of the levels below. `mmspec.drafters.neural.cascades.plan_cascade` chooses levels and lengths
from measured times and agreement. Exact: every level verifies with the distributions of the level
that drafted.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.cascades import cascade_of_models
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=cascade_of_models,
    execution=Chain(Fixed(6)),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SMALL_MODEL,),
    options={"models": (), "lengths": (4,)},
    paper="Wang et al. 2025",
    reconstructed="the planner, from agreement in place of accepted lengths",
)
