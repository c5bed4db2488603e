"""Typical acceptance: keep what the target finds plausible, not what it would have drawn.

Cai et al. 2024 (Medusa), section 2.3.1: accept x where p(x) > min(eps, delta exp(-H(p))), take the
longest accepted path. Lossy when sampling; greedy output is the target's own.
"""

from mmspec.drafters.dynamic_tree import DynamicTree
from mmspec.drafters.neural.feature_head import FEATURE_HEAD
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.recipe import Recipe
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.typical import Typical

RECIPE = Recipe(
    architecture=small_model,
    execution=DynamicTree(depth=5, beam=4, nodes=16),
    verifier=Longest(Typical(epsilon=0.09, delta=0.3)),
    sees="auto",
    draft_model=(SMALL_MODEL, FEATURE_HEAD),
    paper="Cai et al. 2024",
)
