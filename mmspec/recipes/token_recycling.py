"""Token recycling: a tree filled with the target's own runner-up tokens, cached per token.

Luo et al. 2024. Exact; no draft model, and eight candidates per token id. `fresh=False` keeps them
for later requests, as the authors' code does, and so does `memory`, a `CandidateMemory` of
mmspec.drafters.lookup.candidate_memory or its file, which is saved, cleared and shared by threads.
"""

from mmspec.drafters.lookup.token_recycling import TREE, token_recycling
from mmspec.drafters.shapes import StaticTree
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=token_recycling,
    execution=StaticTree(TREE),
    verifier=Coupled(),
    options={"fresh": True, "memory": None},
    paper="Luo et al. 2024",
)
