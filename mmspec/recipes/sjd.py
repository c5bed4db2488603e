"""SJD: the target's own distributions of the last pass are the draft distributions of the next one.

Teng et al. 2025 (ICLR 2025), "Accelerating auto-regressive text-to-image generation with
training-free speculative Jacobi decoding". A window of tokens is scored in one pass and verified by
rejection; what stands behind the first rejection is drawn anew from the distributions just
computed. Exact, no training, no draft model, for any causal model. The papers' window of L tokens
is length L - 1;
`initial` fills new slots: "random", "left", "left-argmax" or "above"; see
`mmspec.drafters.jacobi.initial`.
"""

from mmspec.drafters.jacobi.carry_over import resampled_window, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(resampled_window, 15, Recursive(), paper="Teng et al. 2025")
