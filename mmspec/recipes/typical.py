"""Typical acceptance: accept tokens that are plausible under the target.

Cai et al. 2024 (Medusa), section 2.3.1: accept x where p(x) > min(eps, delta exp(-H(p))), take the
longest accepted path. Lossy when sampling; greedy output is the target's own.
"""

from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.typical import Typical

RECIPE = with_draft_model(
    execution=DynamicTree(depth=5, beam=4, nodes=16),
    verifier=Longest(Typical(epsilon=0.09, delta=0.3)),
    paper="Cai et al. 2024",
)
