"""SpecASR with a two-pass sparse tree: one long trunk, and branches only where it is unsure.

Wei et al. 2025 (arXiv 2507.18181). The second best tokens of unsure places begin branches that grow
together, a forward at a time, until each is in step with the trunk; the rest of that is copied. The
refused rest of a trunk is recycled as in specasr. `TwoPassTree(most, theta, window, branches=4)` as
`tree=` sets all of it. Exact. Reconstructed: theta, window and caps, and that a branch ends where
it is unsure itself.
"""

from dataclasses import replace

from mmspec.drafters.trees.two_pass_tree import TwoPassTree
from mmspec.recipes.specasr import RECIPE as CHAIN

RECIPE = replace(
    CHAIN,
    execution=TwoPassTree(),
    reconstructed="theta, window and caps, and where a branch ends",
)
