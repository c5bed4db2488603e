"""SpecHub: two drafts per node around the drafter's favourite, and a closed-form transport plan.

Sun et al. 2024 (EMNLP). Exact in law; the same acceptance as greedy multi-draft with two children.
"""

from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.spechub import SpecHub

RECIPE = Recipe(
    architecture=small_model,
    execution=StaticTree(Tree.branching([2, 2, 1, 1])),
    verifier=SpecHub(),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Sun et al. 2024",
)
