"""Speculative diffusion, secant: the carried window, each prediction corrected for its new state.

The window of ParaDiGMS under the reflection coupling of De Bortoli et al. 2025
(`accelerated-diffusion-carried`). The predictions that a call leaves behind hold at its own drafted
states; secants through the predictions of two calls move them to the states drafted next, as in
ParaTAA (Tang et al. 2024). `memory` is the number of steps whose secants are used. Exact: the
distribution of the samples is that of the same stochastic sampler, because predictions and secants
of a step correct it and later ones only, whose noise no decision has used yet.
"""

from mmspec.drafters.denoising.frozen import with_old_predictions
from mmspec.drafters.denoising.secant import secant_window
from mmspec.drafters.denoising.window import Constant, Window
from mmspec.verifiers.reflection import Reflection

RECIPE = with_old_predictions(
    secant_window,
    Reflection(),
    Window(pace=Constant(8)),
    options={"root": "prefetch", "memory": 4},
    paper="Tang et al. 2024; De Bortoli et al. 2025",
    reconstructed="the combination of the two is this project's",
)
