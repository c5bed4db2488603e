"""MC-SJD: Jacobi windows whose tokens are kept between rounds by maximal coupling.

So et al. 2026, "Speculative coupled decoding" (first "MC-SJD"). An unverified token is kept with
min(1, p/q), else sampled from norm((p - q)+), which is the maximal coupling and changes no
distribution. Exact: the distribution stored with a token is the new p, also where it was kept
(released code stores the old one for those, which is biased).
"""

from mmspec.drafters.jacobi.window import maximally_coupled_window, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    maximally_coupled_window, 31, Recursive(), needs=("image tokens",), paper="So et al. 2026"
)
