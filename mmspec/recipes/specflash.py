"""SpecFLASH: EAGLE's head, for which latent vectors gather each picture out of the target's states.

Wang et al. 2025. 64 learned vectors A make C = softmax(A F') F of the target's states F at a
picture, without projection or scaling, and stand for it in the head's memory, at the picture's
first positions; the tree is EAGLE's of 25 nodes. Exact, with any head. Trained by
`mmspec.training.heads.EAGLE`. Of the paper this is the compression of pictures: its head that says
several tokens in one pass is not here. Reconstructed: states are the last; a picture of fewer slots
keeps as many vectors; coupled noise in the place of rejection.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from mmspec.drafters.growth import StaticTree
from mmspec.drafters.neural.feature_head import state_head, with_head
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
    paper="Wang et al. 2025",
    reconstructed="which states; coupled noise; without the semi-autoregressive head",
)
