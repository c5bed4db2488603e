"""SpeCa: forecast features of the next denoising steps, verified by the last block.

Liu et al. 2025 (arXiv 2509.11628). Attention and feed-forward outputs are extrapolated as in
TaylorSeer; every forecast step but the first ones also computes its last block, and an error above
a threshold that falls over the steps repeats the step with the whole network. Lossy: accepted
forecasts are not the network's predictions. It needs no noise, so it works with every scheduler.

Unlike the published code, a rejected step is repeated at once (`rollback=False`: the next one
instead), each image is checked separately (`per_sample=False`: the batch), and the error is ||a -
b|| / ||b|| as in the paper's text (`metric="relative-l1"`: as in the code). With `lite=True` the
state before the last block is extrapolated, and that block's layers, instead of all layers: less
memory and time per forecast, with the same check. The defaults are close to those for DiT;
`mmspec.drafters.forecast.presets.SPECA` has the published ones, per model.
"""

from mmspec.drafters.forecast.hooks import forecast_features
from mmspec.errors import choose_option
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_error import METRICS
from mmspec.targets.continuous.forecast_schedule import DecayingThreshold, Stepwise
from mmspec.verifiers.forecast_gate import ForecastGate


def decaying_gate(kit: Kit) -> ForecastGate:
    """The threshold and the check; `metric` is a name of METRICS or a function like them."""
    named = ("base", "decay", "floor", "least", "most", "warm_up")
    schedule = DecayingThreshold(**{name: kit.options[name] for name in named})
    metric = choose_option("metric", kit.options["metric"], METRICS)
    return ForecastGate(schedule, metric, kit.options["rollback"], kit.options["per_sample"])


RECIPE = Recipe(
    architecture=forecast_features,
    execution=Stepwise(walk="last block, per step"),
    verifier=Deferred(decaying_gate, "decaying threshold on the error of the last block", kinds=()),
    sees="target-memory",
    options={
        "basis": "taylor",
        "order": 2,
        "base": 0.1,
        "decay": 0.01,
        "floor": 0.01,
        "least": 2,
        "most": 5,
        "warm_up": 3,
        "metric": "relative-norm",
        "lite": False,
        "rollback": True,
        "per_sample": True,
    },
    paper="Liu et al. 2025",
    reconstructed="rollback and decisions per sample; metric of the paper's text; lite",
    decodes="latents",
)
