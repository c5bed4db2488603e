"""SpecASR with a two-pass sparse tree: one long trunk, and branches only at low confidence.

Wei et al. 2025 (arXiv 2507.18181). The second best tokens of positions of low confidence start
branches that grow together, one forward at a time, until each agrees with the trunk, whose rest is
copied. The rejected rest of a trunk is recycled as in specasr. `TwoPassTree(most, theta, window,
branches=4)` as `tree=` sets all of it. Exact. Reconstructed: theta, window and caps, and that a
branch ends at low confidence.
"""

from dataclasses import replace

from mmspec.drafters.trees.two_pass_tree import TwoPassTree
from mmspec.recipes.specasr import RECIPE as CHAIN

RECIPE = replace(
    CHAIN,
    execution=TwoPassTree(),
    reconstructed="theta, window and caps, and where a branch ends",
)
