"""SJD-PAC: coupled Jacobi windows with several candidates where the next rejection would be.

Kang et al. 2026, "SJD-PAC". Adaptive continuation is maximal coupling (as in MC-SJD); proactive
drafting puts `width` candidates without replacement at each of the first `depth` slots of a window,
at no further forward. Exact; width=1 is MC-SJD. Reconstructed: only the window's own token has
tokens behind it, the other candidates are leaves.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.jacobi.carry_over import OPTIONS, window_with_candidates
from mmspec.drafters.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=window_with_candidates,
    execution=Chain(Fixed(31)),
    verifier=Recursive(),
    sees="target-memory",
    options={**OPTIONS, "depth": 3, "width": 4},
    paper="Kang et al. 2026",
    reconstructed="which candidates have children",
)
