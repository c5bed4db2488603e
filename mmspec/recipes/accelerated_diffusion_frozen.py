"""Speculative diffusion, frozen: the target's last prediction drafts the steps ahead.

De Bortoli, Galashov, Gretton and Doucet 2025 (arXiv 2501.05370), without a draft model and without
training. Exact: the distribution of the samples is that of the same stochastic sampler. `freeze`
selects what is kept constant: "clean" (the clean sample, the best choice for ancestral samplers),
"velocity", "noise" or "increment". `root` selects when the target is called on the first state of a
draft: never ("prefetch", one call per round) or after a rejection ("refresh", as in the paper).
"""

from mmspec.drafters.denoising.frozen import frozen_prediction, with_old_predictions
from mmspec.verifiers.reflection import Reflection

RECIPE = with_old_predictions(
    frozen_prediction,
    Reflection(),
    paper="De Bortoli et al. 2025",
    reconstructed="which quantity is frozen, pace of the window, root='prefetch'",
)
