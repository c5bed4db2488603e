"""SpecFLASH: a semi-autoregressive head, with latent vectors that compress each image.

Wang et al. 2025. The head (`mmspec.models.heads.semi_autoregressive.SemiAutoregressiveHead`)
predicts the states of 5 tokens at once, independent of the tokens between, so that EAGLE's tree of
25 nodes and 5 levels is drafted by one forward; `length=10` drafts a chain of two such blocks, the
second one after the tokens of the first. 64 learned vectors A make C = softmax(A F') F of the
target's states F of an image, without projection or scaling, and replace it in the head's cache, at
the image's first positions. Exact, with any head. Trained by
`mmspec.training.semi_autoregressive.SPECFLASH` on the states of all tokens of a block. The image
compression alone is a feature head with `num_latents`, which is taken too. Reconstructed: states
are the last; the head's attention; an image of fewer slots keeps as many vectors; coupled noise
instead of rejection.
"""

from typing import Any

from mmspec.drafters.neural.feature_head import state_head, with_head
from mmspec.drafters.neural.semi_autoregressive import SEMI_AUTOREGRESSIVE_HEAD, block_head
from mmspec.drafters.shapes import StaticTree
from mmspec.recipes.eagle import TREE
from mmspec.training.semi_autoregressive import SPECFLASH
from mmspec.verifiers.coupled import Coupled

PARTS: dict[str, Any] = {"visual_slots": "compressed", "num_latents": 64}
RECIPE = with_head(
    StaticTree(TREE),
    Coupled(),
    SEMI_AUTOREGRESSIVE_HEAD,
    state_head("feature head (visual_slots='compressed', num_latents=64)", **PARTS),
    architecture=block_head,
    optimisation="regression on the target's states of a block; latent visual slots",
    training=SPECFLASH,
    needs=("image input",),
    paper="Wang et al. 2025",
    reconstructed="which states; the head's attention; coupled noise",
)
