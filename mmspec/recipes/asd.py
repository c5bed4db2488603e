"""Autospeculative decoding: increments of a denoising chain are exchangeable, so one drafts all.

Hu, Das, Sadigh and Anari 2025 (arXiv 2505.03983). In the coordinates of stochastic localisation the
best prediction of every increment ahead is the current one, which is the speculative diffusion of
De Bortoli et al. with a frozen clean sample. Exact for every ancestral sampler with noise; the
exchangeability, and with it most of the gain, needs DDPM's smaller variance ("fixed_small").
"""

from mmspec.drafters.denoising.frozen import frozen_clean_sample, with_old_predictions
from mmspec.verifiers.reflection import Reflection

RECIPE = with_old_predictions(
    frozen_clean_sample,
    Reflection(),
    options={"root": "refresh"},
    paper="Hu et al. 2025",
    reconstructed="pace of the window",
)
