"""SpecTr: k independent drafts per node, accepted by k-sequential selection.

Sun et al. 2023, algorithm 3 (k-SEQ). Exact in law; within 1 - 1/e of the optimal transport plan.
"""

from mmspec.draft import Kind
from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.kseq import KSeq

RECIPE = Recipe(
    architecture=small_model,
    execution=StaticTree(Tree.branching([3, 2, 1, 1]), kinds=(Kind.IID,)),
    verifier=KSeq(),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Sun et al. 2023",
)
