"""ParaDiGMS: a window of the chain is refined in parallel until it hardly moves any more.

Shih et al. 2023 (arXiv 2305.16317): Picard's iteration on a sliding window with fixed noise. Lossy:
states are kept within a tolerance; with ToleranceWindow(0) it is sequential sampling bit for bit,
at no gain. Takes deterministic chains too: errors are measured by the std that the ancestral step
would have on the same grid.
"""

from mmspec.drafters.denoising.picard import carried_window
from mmspec.drafters.denoising.window import Constant, Window
from mmspec.recipe import Recipe
from mmspec.verifiers.tolerance_window import ToleranceWindow

RECIPE = Recipe(
    architecture=carried_window,
    execution=Window(pace=Constant(10), deterministic=True),
    verifier=ToleranceWindow(0.1),
    sees="target-memory",
    options={"freeze": "increment", "root": "prefetch"},
    paper="Shih et al. 2023",
    reconstructed="size of the window, first guesses",
    decodes="latents",
)
