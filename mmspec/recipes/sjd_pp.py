"""SJD++: Jacobi windows that keep tokens of high confidence after a rejection.

Teng et al. 2025, "SJD++" (arXiv 2512.07503). A token after the rejection is kept if p/q > `tau`.
Exact with reuse="one-hot", the default: the distribution of a kept token is a point mass. With
reuse="published" the new p is stored with it, which is lossy and reported as such. tau=inf is SJD.
Reconstructed: the ratio as the measure of confidence, and tau=1; those of the paper are not known.
MC-SJD keeps tokens too, is exact and accepts more.
"""

from mmspec.drafters.jacobi.window import reused_window, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    reused_window,
    15,
    Recursive(),
    options={"tau": 1.0, "reuse": "one-hot"},
    needs=("image tokens",),
    paper="Teng et al. 2025 (SJD++)",
    reconstructed="confidence, its threshold, and the distribution stored with kept tokens",
)
