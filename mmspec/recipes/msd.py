"""MSD: EAGLE's head, which reads images as plain embeddings and fuses states with text alone.

Lin et al. 2025, "Speculative decoding reimagined for multimodal large language models". A slot that
reads a visual embedding skips the fusion of embedding and state; all of them stay in the head's
cache, at their own positions. The tree has 58 nodes of 6 levels, 10 wide. Exact: the target
verifies at its own positions, also with M-RoPE. Trained by `mmspec.training.heads.EAGLE` on text
first, then on images. Reconstructed: the first visual slot is not patched with the text after an
image, as the released code does; coupled noise instead of rejection.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from mmspec.draft import Kind
from mmspec.drafters.neural.feature_head import state_head, with_head
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.heads import EAGLE, new_head
from mmspec.verifiers.coupled import Coupled

PARTS: dict[str, Any] = {"visual_slots": "raw"}
RECIPE = with_head(
    DynamicTree(depth=6, beam=10, nodes=58, kinds=(Kind.DET,)),
    Coupled(),
    state_head("feature head (visual_slots='raw')", **PARTS),
    optimisation="regression on the target's states; bare visual slots",
    training=replace(EAGLE, begin=partial(new_head, **PARTS)),
    needs=("image input",),
    paper="Lin et al. 2025",
    reconstructed="the first visual slot; coupled noise instead of rejection",
)
