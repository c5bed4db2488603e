"""Token recycling: a tree filled from the target's own runner-up tokens, remembered per token.

Luo et al. 2024. Exact; no draft model, and eight candidates per word of the vocabulary, which later
requests find again (`fresh=True`: they do not).
"""

from mmspec.drafters.growth import StaticTree
from mmspec.drafters.lookup.token_recycling import TREE, token_recycling
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=token_recycling,
    execution=StaticTree(TREE),
    verifier=Coupled(),
    options={"fresh": False},
    paper="Luo et al. 2024",
)
