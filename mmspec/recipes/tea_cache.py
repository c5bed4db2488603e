"""TeaCache: all blocks are skipped while the first one's modulated input has hardly changed.

Liu et al. 2025 (arXiv 2411.19108). The change of that input, rescaled by a polynomial into the
expected change of the output, is accumulated up to a `threshold`. `coefficients` of the polynomial
are those of the authors for FLUX, HunyuanVideo, LTX-Video and Mochi; for other networks, and with
"fit", the first call of 5 steps or more computes every step and fits them. Published thresholds are
0.25 to 0.8 for FLUX and 0.03 to 0.15 for video. Lossy; `threshold=0` changes nothing.
"""

from mmspec.drafters.forecast.modulated import modulated_cache
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_schedule import Stepwise
from mmspec.verifiers.cached_steps import AccumulatedChangeGate


def change_gate(kit: Kit) -> AccumulatedChangeGate:
    """The accumulated change at which a step is computed."""
    options = kit.options
    return AccumulatedChangeGate(options["threshold"], options["most"], options["warm_up"])


RECIPE = Recipe(
    architecture=modulated_cache,
    execution=Stepwise(),
    verifier=Deferred(change_gate, "accumulated change of the modulated input", kinds=()),
    sees="target-memory",
    options={"threshold": 0.15, "most": 0, "warm_up": 1, "coefficients": None},
    paper="Liu et al. 2025",
    reconstructed="unpublished coefficients: fitted to the states after the last block",
    decodes="latents",
)
