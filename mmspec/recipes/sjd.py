"""SJD: the target's own laws of the last pass are the draft laws of the next one.

Teng et al. 2025 (ICLR 2025), "Accelerating auto-regressive text-to-image generation with
training-free speculative Jacobi decoding". A window of tokens is scored in one pass and verified by
rejection; what stands behind the first rejection is drawn anew from the laws just computed. Exact,
no training, no draft model, for any causal model. The papers' window of L tokens is length L - 1;
`initial` fills new slots: "random", "left", "left-argmax" or "above"; see
`mmspec.drafters.jacobi.initial`.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.jacobi.carry_over import OPTIONS, resampled_window
from mmspec.drafters.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=resampled_window,
    execution=Chain(Fixed(15)),
    verifier=Recursive(),
    sees="target-memory",
    options=OPTIONS,
    paper="Teng et al. 2025",
)
