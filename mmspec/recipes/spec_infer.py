"""SpecInfer: a token tree whose siblings are independent draws, verified by multi-step rejection.

Miao et al. 2024, algorithm 2. Exact in distribution. Duplicated siblings count as separate draws.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.recursive import Recursive

RECIPE = with_draft_model(
    execution=StaticTree(Tree.branching([3, 2, 1, 1]), kinds=(Kind.IID,)),
    verifier=Recursive(),
    paper="Miao et al. 2024",
)
