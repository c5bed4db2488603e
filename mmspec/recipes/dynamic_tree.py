"""Dynamic tree: expand the likeliest paths of a small model, verify the best nodes.

The tree of EAGLE-2 (Li et al. 2024, section 4; OPT-Tree, Wang et al. 2024) over an independent
draft model. Exact: nodes are selected by their probability, so each counts as a deterministic
proposal.
"""

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.verifiers.coupled import Coupled

RECIPE = with_draft_model(
    execution=DynamicTree(depth=5, beam=4, nodes=16),
    verifier=Coupled(),
    paper="Li et al. 2024; Wang et al. 2024",
)
