"""SJD++: Jacobi windows that keep the tokens which the target has come to like.

Teng et al. 2025, "SJD++" (arXiv 2512.07503). A token behind the rejection stays where p/q > `tau`.
Exact with reuse="one-hot", the default: a kept token counts as chosen, its law is a point mass.
With reuse="published" the new p is stored with it, which is lossy, and the run says so. tau=inf is
SJD. Reconstructed: the ratio as the measure of confidence, and tau=1; the paper's own were not
seen. MC-SJD keeps tokens too, loses nothing and accepts more.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.jacobi.carry_over import OPTIONS, reused_window
from mmspec.drafters.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=reused_window,
    execution=Chain(Fixed(15)),
    verifier=Recursive(),
    sees="target-memory",
    options={**OPTIONS, "tau": 1.0, "reuse": "one-hot"},
    paper="Teng et al. 2025 (SJD++)",
    reconstructed="the measure of confidence, its threshold, and the law stored with kept tokens",
)
