"""CSpD made exact: drafted paths of the diffusion head are compared as a whole, steps in order.

After Wang et al. 2024 (arXiv 2411.11925), with the same drafts and aligned noise. Exact: the
distribution of the pictures is that of the target with the same number of steps, guidance,
temperature and noise. Two things differ. The target reads the drafted steps, N + 1 pictures side by
side in one pass, so each is judged by its own distribution, and what reads a refused cell is
dropped. And the whole path of a cell decides, by its density under target and draft, not the
Gaussian at its end.

The density asks for noise in every step of the head, and the usual sampler has none in the last:
calls take `last_noise=True`, which is another target (its tokens have noise of about 0.006 more,
for 100 steps and latents of variance 1) and the one that is kept.
"""

from mmspec.drafters.denoising.patches import SMALL_MAR, aligned_model
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.path_ratio import PathRatio

RECIPE = Recipe(
    architecture=aligned_model,
    execution=Chain(Fixed(4)),
    verifier=PathRatio(),
    optimisation="trajectory alignment",
    draft_model=(SMALL_MAR,),
    options={"prefill": 0.0},
    paper="after Wang et al. 2024",
    reconstructed="the coupling; the paper's rule is not exact as released",
    decodes="patches",
)
