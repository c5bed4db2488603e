"""SJD-PAC: coupled Jacobi windows with several candidates where the next rejection would be.

Kang et al. 2026, "SJD-PAC". Adaptive continuation is maximal coupling (as in MC-SJD); proactive
drafting puts `width` candidates without replacement at each of the first `depth` slots of a window,
at no further forward. Exact; width=1 is MC-SJD. Reconstructed: only the window's own token has
tokens behind it, the other candidates are leaves.
"""

from mmspec.drafters.jacobi.carry_over import window_with_candidates, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    window_with_candidates,
    31,
    Recursive(),
    options={"depth": 3, "width": 4},
    paper="Kang et al. 2026",
    reconstructed="which candidates have children",
)
