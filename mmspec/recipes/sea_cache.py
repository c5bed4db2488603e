"""SeaCache: all blocks are skipped while the filtered states have hardly changed.

The cache of diffusers (arXiv 2602.18993). Like TeaCache (Liu et al. 2025) it accumulates relative
changes and computes a full step above a `threshold`; its indicator needs no coefficients per model:
the states, filtered by what a denoiser recovers at their noise level. The residual is extrapolated
(`order=1`) or repeated (0). The published settings are for video. Lossy; `threshold=0` changes
nothing.
"""

from mmspec.drafters.forecast.spectral import spectral_cache
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_schedule import Stepwise
from mmspec.verifiers.cached_steps import AccumulatedChangeGate


def change_gate(kit: Kit) -> AccumulatedChangeGate:
    """The accumulated change at which a step is computed."""
    options = kit.options
    return AccumulatedChangeGate(options["threshold"], options["most"], options["warm_up"])


RECIPE = Recipe(
    architecture=spectral_cache,
    execution=Stepwise(),
    verifier=Deferred(change_gate, "accumulated change of the filtered states", kinds=()),
    sees="target-memory",
    options={"threshold": 0.25, "most": 2, "warm_up": 1, "order": 1},
    paper="diffusers; arXiv 2602.18993",
    decodes="latents",
)
