"""Recursive rejection sampling: a token tree whose siblings are sampled without replacement.

Jeon et al. 2024 (RSD-C); Chen et al. 2024 (Sequoia). Exact in distribution.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.recursive import Recursive

RECIPE = with_draft_model(
    execution=StaticTree(Tree.branching([3, 2, 1, 1]), kinds=(Kind.WOR,)),
    verifier=Recursive(),
    paper="Jeon et al. 2024; Chen et al. 2024",
)
