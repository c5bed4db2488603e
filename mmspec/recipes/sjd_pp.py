"""SJD++: Jacobi windows that keep the tokens which the target has come to like.

Teng et al. 2025, "SJD++" (arXiv 2512.07503). A token behind the rejection stays where p/q > `tau`.
Exact with reuse="one-hot", the default: a kept token counts as chosen, its distribution is a point
mass. With reuse="published" the new p is stored with it, which is lossy, and the run says so.
tau=inf is SJD. Reconstructed: the ratio as the measure of confidence, and tau=1; the paper's own
were not seen. MC-SJD keeps tokens too, loses nothing and accepts more.
"""

from mmspec.drafters.jacobi.carry_over import reused_window, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    reused_window,
    15,
    Recursive(),
    options={"tau": 1.0, "reuse": "one-hot"},
    paper="Teng et al. 2025 (SJD++)",
    reconstructed="the measure of confidence, its threshold, and the distribution stored with kept tokens",
)
