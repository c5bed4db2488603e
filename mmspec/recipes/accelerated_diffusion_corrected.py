"""Speculative diffusion, corrected: drafts extrapolate the target's last predictions.

After De Bortoli, Galashov, Gretton and Doucet 2025 (arXiv 2501.05370): a frozen draft and a cheap
correction, here the polynomial of degree `order` through the predictions at the last committed
states. Exact: the distribution of the samples is that of the same stochastic sampler. An ideal
denoiser's clean sample is a martingale, so expect a gain over the frozen draft only for samplers
with little noise, or networks that drift.
"""

from mmspec.drafters.denoising.extrapolated import extrapolated_prediction
from mmspec.drafters.denoising.frozen import with_old_predictions
from mmspec.verifiers.reflection import Reflection

RECIPE = with_old_predictions(
    extrapolated_prediction,
    Reflection(),
    options={"freeze": "clean", "root": "prefetch", "order": 1},
    paper="De Bortoli et al. 2025",
    reconstructed="the correction and the pace of the window",
)
