"""Traversal verification: verify a token tree from its leaves upwards.

Weng et al. 2025. Exact in distribution; never shorter than recursive rejection on the same tree.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.traversal import Traversal

RECIPE = with_draft_model(
    execution=StaticTree(Tree.branching([3, 2, 1, 1]), kinds=(Kind.WOR,)),
    verifier=Traversal(),
    paper="Weng et al. 2025",
    reconstructed="sibling order and the exact recursion are derived, and checked by enumeration",
)
