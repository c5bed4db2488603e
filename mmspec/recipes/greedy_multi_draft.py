"""Greedy multi-draft: the top tokens of q, then one draw from the rest.

Near-optimal acceptance at O(V).

Hu et al. 2025, "Towards optimal multi-draft speculative decoding". Exact in law.
"""

from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft

RECIPE = Recipe(
    architecture=small_model,
    execution=StaticTree(Tree.branching([3, 2, 1, 1])),
    verifier=GreedyMultiDraft(),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Hu et al. 2025",
)
