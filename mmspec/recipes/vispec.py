"""ViSpec: EAGLE-2's head, with a resampler that turns each image into one slot and one vector.

Kang et al. 2025, "ViSpec: accelerating vision-language models with vision-aware speculative
decoding". Two learned queries attend to an image's embeddings: one output replaces the image in the
head's cache, at its last position, the other is joined to every later state. The tree has 29 nodes
of 4 levels, 8 wide. Exact, with any head. Trained by `mmspec.training.vispec.VISPEC`.
Reconstructed: coupled noise instead of rejection.
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
    needs=("image input",),
    paper="Kang et al. 2025",
    reconstructed="coupled noise instead of rejection",
)
