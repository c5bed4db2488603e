"""Dynamic tree: grow the likeliest paths of a small model, verify the best nodes of all.

The tree of EAGLE-2 (Li et al. 2024, section 4; OPT-Tree, Wang et al. 2024) over an independent
draft model. Exact: nodes are chosen by looking at them, so each counts as a deterministic proposal.
"""

from mmspec.drafters.dynamic_tree import DynamicTree
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=small_model,
    execution=DynamicTree(depth=5, beam=4, nodes=16),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Li et al. 2024; Wang et al. 2024",
)
