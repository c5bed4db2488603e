"""Greedy multi-draft: the top tokens of q, then one draw from the rest.

Near-optimal acceptance at O(V).

Hu et al. 2025, "Towards optimal multi-draft speculative decoding". Exact in distribution.
"""

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft

RECIPE = with_draft_model(
    execution=StaticTree(Tree.branching([3, 2, 1, 1])),
    verifier=GreedyMultiDraft(),
    paper="Hu et al. 2025",
)
