"""SAGE: deep trees after low entropy of the target, wide trees after high entropy.

Tong et al. 2026, "SAGE". The entropy of the last distribution of a round determines the shape of
the next tree. Exact: the shape is fixed before drafting. Reconstructed: how entropy becomes depth
and width, and all sizes (`mmspec.drafters.trees.entropy_tree.EntropyTree`); verified with coupled
noise.
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
