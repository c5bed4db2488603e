"""Speculative diffusion, carried: each step is drafted with its own last prediction.

The window of ParaDiGMS (Shih et al. 2023) under the reflection coupling of De Bortoli et al. 2025.
A call predicts a whole window; predictions after a rejection draft the same steps again. Exact: the
distribution of the samples is that of the same stochastic sampler, because a prediction made at a
state is used for that step and later ones only, whose noise no decision has used yet.
`accelerated-diffusion-secant` takes fewer calls.
"""

from mmspec.drafters.denoising.frozen import with_old_predictions
from mmspec.drafters.denoising.picard import carried_window
from mmspec.drafters.denoising.window import Mismatch, Window
from mmspec.verifiers.reflection import Reflection

RECIPE = with_old_predictions(
    carried_window,
    Reflection(),
    Window(pace=Mismatch(max_deviations=3.0)),
    paper="Shih et al. 2023; De Bortoli et al. 2025",
    reconstructed="the combination of the two is this project's",
)
