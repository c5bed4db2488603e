"""Pool of searches: the drafter of each round is chosen online, and none needs a draft model.

As `pool`, over searches in the text and in the target's own candidates. Exact; see there for the
options.
"""

from mmspec.recipe import Recipe
from mmspec.recipes.pool import ChosenShape, pool_of_recipes
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=pool_of_recipes,
    execution=ChosenShape(),
    verifier=Coupled(),
    options={
        "arms": ("prompt-lookup", "suffix", "token-recycling"),
        "selector": "hedge",
        "longest": 8,
        "fresh": True,
    },
    paper="Hou et al. 2025; Not-a-Bandit, 2025",
    reconstructed="the reward and the rates",
)
