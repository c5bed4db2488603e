"""Speculative diffusion: a smaller denoiser drafts steps, the target verifies a window in one call.

De Bortoli, Galashov, Gretton and Doucet 2025 (arXiv 2501.05370), with an independent draft model on
the target's grid. The first rejected step is reflected at the plane between the two means. Exact:
the distribution of the samples is that of the same stochastic sampler with the same number of
steps.
"""

from mmspec.drafters.denoising.small_denoiser import DRAFT_PIPELINE, small_denoiser
from mmspec.drafters.denoising.window import Window
from mmspec.recipe import Recipe
from mmspec.verifiers.reflection import Reflection

RECIPE = Recipe(
    architecture=small_denoiser,
    execution=Window(),
    verifier=Reflection(),
    draft_model=(DRAFT_PIPELINE,),
    paper="De Bortoli et al. 2025",
    reconstructed="pace of the window",
    decodes="latents",
)
