"""Draft & Verify: the target drafts for itself with some of its layers left out, while it is sure.

Zhang et al. 2023, "Draft & Verify: lossless large language model acceleration via
self-speculative decoding". Draft while max q >= threshold, decided before each draw. Nothing is
trained and nothing is stored: the draft runs on the target's own memory. Exact. Reconstructed:
the paper searches attention and MLP sub-layers with Bayesian optimisation; here whole layers are
skipped, every other inner one unless `skip` names them, and the threshold is fixed.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Confidence
from mmspec.drafters.neural.shared import skipping, with_own_layers
from mmspec.verifiers.coupled import Coupled

RECIPE = with_own_layers(
    skipping,
    Chain(Confidence(threshold=0.8, most=8)),
    Coupled(),
    options={"skip": None, "share": 0.5},
    paper="Zhang et al. 2023",
    reconstructed="whole layers instead of searched sub-layers; a fixed threshold",
)
