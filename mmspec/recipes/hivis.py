"""HiViS: EAGLE's head without visual slots; text states carry the image, self-fed steps a residual.

Xie et al. 2025, "HiViS: hiding visual tokens from the drafter". The head reads text slots alone,
whose states the target has already fused with the image, at positions counted over text alone; its
input is corrected by a learned residual per self-fed step. Exact, with any head. Trained on its own
states by `mmspec.training.self_fed.HIVIS`, without the likeliest tokens. Reconstructed: the
residual is added after the fusion, for 7 steps; positions are compact; the tree is that of
`eagle-2`, verified with coupled noise; the loss.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import state_head, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.self_fed import HIVIS
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=6, beam=10, nodes=59, kinds=(Kind.DET,)),
    Coupled(),
    state_head("feature head (visual_slots='hidden')", visual_slots="hidden", positions="compact"),
    optimisation="regression on the target's states from its own; no visual slots",
    training=HIVIS,
    needs=("image input",),
    paper="Xie et al. 2025",
    reconstructed="residuals, positions, tree and loss",
)
