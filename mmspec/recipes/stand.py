"""STAND: the target's distributions are stored by n-gram and drawn from when the n-gram recurs.

STAND, 2025. After the last `longest` tokens or fewer, siblings are drawn from the stored `kept`
most probable tokens by Gumbel top-k, and verified by rejection sampling without replacement, with
the stored distribution as q. Exact; no draft model. Reconstructed: a fixed tree, where the paper
optimises its shape on data.
"""

from mmspec.drafters.lookup.stored_distributions import stored_distributions
from mmspec.drafters.shapes import StaticTree
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=stored_distributions,
    execution=StaticTree(Tree.branching([3, 2, 1, 1])),
    verifier=Recursive(),
    options={"longest": 4, "kept": 10},
    least={"longest": 1, "kept": 1},
    paper="STAND, 2025",
    reconstructed="the shape of the tree",
)
