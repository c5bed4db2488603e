"""PAB, pyramid attention broadcast: outputs of attention layers are reused for a few steps.

Zhao et al. 2024 (arXiv 2408.12588), the cache of diffusers. Between the timesteps `begin` and `end`
(of 1000 to 0) spatial, temporal and cross attention are computed once in so many steps, and
feed-forward layers in every step, so at most the share of attention is saved. Works with U-Nets
too. Lossy, without a measure of its error; ranges of 1 change nothing.
"""

from mmspec.drafters.forecast.broadcast import attention_broadcast
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_schedule import Stepwise
from mmspec.verifiers.cached_steps import BroadcastGate


def broadcast_gate(kit: Kit) -> BroadcastGate:
    """The ranges of each kind of attention."""
    return BroadcastGate(**kit.options)


RECIPE = Recipe(
    architecture=attention_broadcast,
    execution=Stepwise(),
    verifier=Deferred(broadcast_gate, "none: a fixed cadence", kinds=()),
    sees="target-memory",
    options={"spatial": 2, "temporal": 4, "cross": 6, "begin": 800.0, "end": 100.0},
    least={"spatial": 1, "temporal": 1, "cross": 1},
    paper="Zhao et al. 2024",
    decodes="latents",
)
