"""SpecFLASH: EAGLE's head, with latent vectors that compress each image from the target's states.

Wang et al. 2025. 64 learned vectors A make C = softmax(A F') F of the target's states F of an
image, without projection or scaling, and replace it in the head's cache, at the image's first
positions; the tree is EAGLE's of 25 nodes. Exact, with any head. Trained by
`mmspec.training.heads.EAGLE`. This is the image compression of the paper, without its
semi-autoregressive head. Reconstructed: states are the last; an image of fewer slots keeps as many
vectors; coupled noise instead of rejection.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from mmspec.drafters.neural.feature_head import state_head, with_head
from mmspec.drafters.shapes import StaticTree
from mmspec.recipes.eagle import TREE
from mmspec.training.heads import EAGLE, new_head
from mmspec.verifiers.coupled import Coupled

PARTS: dict[str, Any] = {"visual_slots": "compressed", "num_latents": 64}
RECIPE = with_head(
    StaticTree(TREE),
    Coupled(),
    state_head("feature head (visual_slots='compressed', num_latents=64)", **PARTS),
    optimisation="regression on the target's states; latent visual slots",
    training=replace(EAGLE, begin=partial(new_head, **PARTS)),
    needs=("image input",),
    paper="Wang et al. 2025",
    reconstructed="which states; coupled noise; without the semi-autoregressive head",
)
