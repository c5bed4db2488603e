"""SJD-PAC: coupled Jacobi windows with several candidates at the next likely rejection.

Kang et al. 2026, "SJD-PAC". Adaptive continuation is maximal coupling (as in MC-SJD); proactive
drafting puts `width` candidates without replacement at each of the first `depth` slots of a window,
without a further forward. Exact; width=1 is MC-SJD. Reconstructed: only the window's own token has
children, the other candidates are leaves.
"""

from mmspec.drafters.jacobi.window import window_with_candidates, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    window_with_candidates,
    31,
    Recursive(),
    options={"depth": 3, "width": 4},
    least={"depth": 1, "width": 1},
    needs=("image tokens",),
    paper="Kang et al. 2026",
    reconstructed="which candidates have children",
)
