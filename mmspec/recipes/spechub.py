"""SpecHub: two drafts per node with the likeliest token, and a closed-form transport plan.

Sun et al. 2024 (EMNLP). Exact in distribution; the same acceptance as greedy multi-draft with two
children.
"""

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import StaticTree
from mmspec.trees import Tree
from mmspec.verifiers.spechub import SpecHub

RECIPE = with_draft_model(
    execution=StaticTree(Tree.branching([2, 2, 1, 1])),
    verifier=SpecHub(),
    paper="Sun et al. 2024",
)
