"""SAGE: deep trees where the target was sure a moment ago, wide ones where it was not.

Tong et al. 2026, "SAGE". The entropy of the distribution that ended the last round shapes the next
tree. Exact: the shape is settled before anything is drafted. Reconstructed: how entropy becomes
depth and width, and all sizes (`mmspec.drafters.trees.entropy_tree.EntropyTree`); verified with
coupled noise.
"""

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.entropy_tree import EntropyTree
from mmspec.verifiers.coupled import Coupled

RECIPE = with_draft_model(
    EntropyTree(),
    Coupled(),
    paper="Tong et al. 2026",
    reconstructed="from entropy to depth and width, sizes; coupled noise",
)
