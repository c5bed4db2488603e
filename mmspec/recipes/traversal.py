"""Traversal verification: judge a token tree from its leaves upwards.

Weng et al. 2025. Exact in law; never shorter than recursive rejection on the same tree.
"""

from mmspec.draft import Kind
from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.traversal import Traversal

RECIPE = Recipe(
    architecture=small_model,
    execution=StaticTree(Tree.branching([3, 2, 1, 1]), kinds=(Kind.WOR,)),
    verifier=Traversal(),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Weng et al. 2025",
    reconstructed="sibling order and the exact recursion are derived, and checked by enumeration",
)
