"""Speculative diffusion, frozen: the target's last prediction drafts the steps ahead.

De Bortoli, Galashov, Gretton and Doucet 2025 (arXiv 2501.05370), without a draft model and without
training. Exact: the law of the samples is that of the same stochastic sampler. `freeze` says what
is kept: "clean" (the clean sample, the best choice for ancestral samplers), "velocity", "noise" or
"increment". `root` says when the target is asked about the state a draft begins at: never
("prefetch", one call per round) or after a rejection ("refresh", as in the paper).
"""

from mmspec.drafters.denoising.frozen import frozen_prediction
from mmspec.drafters.denoising.window import Mismatch, Window
from mmspec.recipe import Recipe
from mmspec.verifiers.reflection import Reflection

RECIPE = Recipe(
    architecture=frozen_prediction,
    execution=Window(pace=Mismatch()),
    verifier=Reflection(),
    sees="target-memory",
    options={"freeze": "clean", "root": "prefetch"},
    paper="De Bortoli et al. 2025",
    reconstructed="which quantity is frozen, pace of the window, root='prefetch'",
    decodes="latents",
)
