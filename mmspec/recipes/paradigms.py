"""ParaDiGMS: a window of the chain is refined in parallel until it converges.

Shih et al. 2023 (arXiv 2305.16317): Picard's iteration on a sliding window with fixed noise. Lossy:
states are kept within a tolerance; with ToleranceWindow(0) it is sequential sampling bit for bit,
at no gain. Takes deterministic chains too: errors are measured by the std that the ancestral step
would have on the same grid.
"""

from mmspec.drafters.denoising.frozen import with_old_predictions
from mmspec.drafters.denoising.picard import carried_window
from mmspec.drafters.denoising.window import Constant, Window
from mmspec.verifiers.tolerance_window import ToleranceWindow

RECIPE = with_old_predictions(
    carried_window,
    ToleranceWindow(0.1),
    Window(pace=Constant(10), deterministic=True),
    options={"freeze": "increment", "root": "prefetch"},
    paper="Shih et al. 2023",
    reconstructed="size of the window, first guesses",
)
