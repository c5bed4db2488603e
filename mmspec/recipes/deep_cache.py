"""DeepCache: the deep levels of a U-Net are computed in one step of so many.

Ma et al. 2024 (arXiv 2312.00858, CVPR). In the other steps the outermost `depth` levels run with
the deep feature of the last full step. For U-Nets, which have no stack of blocks that other caches
skip. Lossy, without a measure of its error; `interval=1` changes nothing. The interval is that of
the paper's uniform schedule; the paper cuts between layers, this between blocks.
"""

from mmspec.drafters.forecast.deep_blocks import deep_block_cache
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_schedule import Stepwise
from mmspec.verifiers.cached_steps import IntervalGate


def interval_gate(kit: Kit) -> IntervalGate:
    """How many steps share their deep features."""
    return IntervalGate(kit.options["interval"])


RECIPE = Recipe(
    architecture=deep_block_cache,
    execution=Stepwise(),
    verifier=Deferred(interval_gate, "none: a fixed cadence", kinds=()),
    sees="target-memory",
    options={"interval": 3, "depth": 1},
    least={"interval": 1, "depth": 1},
    paper="Ma et al. 2024",
    decodes="latents",
)
