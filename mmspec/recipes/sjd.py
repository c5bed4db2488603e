"""SJD: the target's distributions of one pass are the draft distributions of the next.

Teng et al. 2025 (ICLR 2025), "Accelerating auto-regressive text-to-image generation with
training-free speculative Jacobi decoding". A window of tokens is scored in one pass and verified by
rejection; tokens after the first rejection are sampled again from the new distributions. Exact, no
training, no draft model, for any causal model. The papers' window of L tokens is length L - 1;
`initial` fills new slots: "random", "left", "left-argmax" or "above"; see
`mmspec.drafters.jacobi.initial`.
"""

from mmspec.drafters.jacobi.window import resampled_window, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    resampled_window, 15, Recursive(), needs=("image tokens",), paper="Teng et al. 2025"
)
