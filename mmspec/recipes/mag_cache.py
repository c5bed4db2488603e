"""MagCache: all blocks are skipped while the norm of their residual is expected to stay the same.

Ma et al. 2025 (arXiv 2506.09045), the cache of diffusers. The ratios of norms from step to step are
those of a network, not of a prompt: without `ratios` the first call computes every step and
measures them; FLUX's own are in diffusers (`FLUX_MAG_RATIOS`). A list for another number of steps
is interpolated. Lossy. A `threshold` below 0 changes nothing.
"""

from mmspec.drafters.forecast.magnitude import magnitude_cache
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_schedule import Stepwise
from mmspec.verifiers.cached_steps import MagnitudeGate


def magnitude_gate(kit: Kit) -> MagnitudeGate:
    """The accumulated error at which a step is computed."""
    options = kit.options
    return MagnitudeGate(options["threshold"], options["most"], options["retention"])


RECIPE = Recipe(
    architecture=magnitude_cache,
    execution=Stepwise(),
    verifier=Deferred(magnitude_gate, "accumulated change of the residual's norm", kinds=()),
    sees="target-memory",
    options={"threshold": 0.06, "most": 3, "retention": 0.2, "ratios": None},
    paper="Ma et al. 2025",
    decodes="latents",
)
