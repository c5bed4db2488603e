"""SpecTr: k independent drafts per node, accepted by k-sequential selection.

Sun et al. 2023, algorithm 3 (k-SEQ). Exact in distribution; within 1 - 1/e of the optimal transport
plan.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.kseq import KSeq

RECIPE = with_draft_model(
    execution=StaticTree(Tree.branching([3, 2, 1, 1]), kinds=(Kind.IID,)),
    verifier=KSeq(),
    paper="Sun et al. 2023",
)
