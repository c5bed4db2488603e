"""TaylorSeer: features of most denoising steps are extrapolated without verification.

Liu et al. 2025 (arXiv 2503.06923, ICCV). After `warm_up` full steps one step in `interval` is
computed; in the others attention and feed-forward outputs follow their Taylor expansion of the
given order (`basis="newton"`: divided differences, exact for polynomials). Lossy, without a measure
of its error; `interval=1` changes nothing. With `lite=True` the output of the whole network is
extrapolated instead: less memory, and for networks without a stack of transformer blocks.
Differences of features begin with the last step of the warm-up, as in the published code. The
defaults are conservative; those of the authors are in
`mmspec.drafters.forecast.presets.TAYLORSEER`.
"""

from mmspec.drafters.forecast.hooks import forecast_features
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_schedule import Stepwise
from mmspec.verifiers.forecast_gate import ForecastGate, fixed_cadence


def cadence_gate(kit: Kit) -> ForecastGate:
    """A fixed cadence, without any check."""
    return fixed_cadence(kit.options["interval"], kit.options["warm_up"])


RECIPE = Recipe(
    architecture=forecast_features,
    execution=Stepwise(),
    verifier=Deferred(cadence_gate, "none: a fixed cadence", kinds=()),
    sees="target-memory",
    options={"basis": "taylor", "order": 1, "interval": 4, "warm_up": 3, "lite": False},
    least={"interval": 1, "warm_up": 1},
    paper="Liu et al. 2025",
    reconstructed="",
    decodes="latents",
)
