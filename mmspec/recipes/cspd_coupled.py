"""CSpD made exact: whole drafted paths of the diffusion head are verified, in order.

After Wang et al. 2024 (arXiv 2411.11925), with the same drafts and aligned noise. Exact: the
distribution of the images is that of the target with the same number of steps, guidance,
temperature and noise. Two things differ. The target reads the drafted steps, N + 1 images in one
pass, so each is judged by its own distribution, and cells that read a rejected one are dropped. A
cell is accepted by the density of its whole path under target and draft, not by its last Gaussian.

The density asks for noise in every step of the head, and the usual sampler has none in the last:
calls take `last_noise=True`, which is another target (its tokens have noise of about 0.006 more,
for 100 steps and latents of variance 1) and the one that is reproduced.
"""

from mmspec.drafters.denoising.patches import SMALL_MAR, aligned_model
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
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
