"""EAGLE-2: the feature head of EAGLE expands its likeliest paths, and the best nodes are verified.

Li et al. 2024, "EAGLE-2: faster inference of language models with dynamic draft trees". The drafter
is a `mmspec.models.heads.feature_head.FeatureHead`; every level expands the 10 likeliest paths, and
the 59 likeliest nodes of 6 levels are verified as deterministic candidates. Exact. Reconstructed:
verified with coupled noise, which accepts as often as the paper's rejection for such candidates and
gives the tokens of plain decoding with the same seed; `tree=DynamicTree()` samples candidates with
that noise.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.heads import EAGLE
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,)),
    Coupled(),
    paper="Li et al. 2024",
    training=EAGLE,
    reconstructed="coupled noise instead of rejection",
)
