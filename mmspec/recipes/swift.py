"""SWIFT: the target drafts for itself without 45 % of its inner layers.

Xia et al. 2024, "SWIFT: on-the-fly self-speculative decoding for LLM inference acceleration". The
first and the last layer are kept, and drafting continues while the confidence is high. Exact.
Reconstructed: SWIFT searches its set of sub-layers during decoding; here it is fixed, evenly spread
whole layers unless `skip` names them.
"""

from mmspec.drafters.lengths.length import Confidence
from mmspec.drafters.neural.shared import skipping, with_own_layers
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_own_layers(
    skipping,
    Chain(Confidence(threshold=0.8, max_length=10)),
    Coupled(),
    options={"skip": None, "share": 0.45},
    paper="Xia et al. 2024",
    reconstructed="a fixed set of whole layers instead of searched sub-layers",
)
