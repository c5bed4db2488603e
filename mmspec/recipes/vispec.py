"""ViSpec: EAGLE-2's head, for which a resampler turns each picture into one slot and one vector.

Kang et al. 2025, "ViSpec: accelerating vision-language models with vision-aware speculative
decoding". Two learned queries look at a picture's embeddings: one answer stands for the picture in
the head's memory, at the picture's last position, the other is joined to every later state. The
tree has 29 nodes of 4 levels, 8 wide. Exact, with any head. Trained by
`mmspec.training.vispec.VISPEC`. Reconstructed: coupled noise in the place of rejection.
"""

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import state_head, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.vispec import VISPEC
from mmspec.verifiers.coupled import Coupled

RECIPE = with_head(
    DynamicTree(depth=4, beam=8, nodes=29, kinds=(Kind.DET,)),
    Coupled(),
    state_head(
        "feature head (visual_slots='compressed', num_q=2)", visual_slots="compressed", num_q=2
    ),
    optimisation="total variation and order of the target's likeliest tokens",
    training=VISPEC,
    paper="Kang et al. 2025",
    reconstructed="coupled noise instead of rejection",
)
