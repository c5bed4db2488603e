"""Draft & Verify: the target drafts with some layers skipped, while its confidence is high.

Zhang et al. 2023, "Draft & Verify: lossless large language model acceleration via self-speculative
decoding". It drafts while max q >= threshold, decided before each draw. No training: the draft uses
the target's own cache. Exact. Reconstructed: the paper searches attention and MLP sub-layers with
Bayesian optimisation; here whole layers are skipped, every other inner one unless `skip` names
them, and the threshold is fixed.
"""

from mmspec.drafters.lengths.length import Confidence
from mmspec.drafters.neural.shared import skipping, with_own_layers
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.coupled import Coupled

RECIPE = with_own_layers(
    skipping,
    Chain(Confidence(threshold=0.8, max_length=8)),
    Coupled(),
    options={"skip": None, "share": 0.5},
    paper="Zhang et al. 2023",
    reconstructed="whole layers instead of searched sub-layers; a fixed threshold",
)
