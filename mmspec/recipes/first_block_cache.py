"""First-block cache: the other blocks are skipped while the first one hardly changes.

The cache of diffusers (after TeaCache, Liu et al. 2025, and ParaAttention), as a baseline for
speca: it checks with the first block before a step, SpeCa with the last block after it. Lossy. A
`threshold` below 0 changes nothing.
"""

from mmspec.drafters.forecast.first_block import first_block_cache
from mmspec.recipe import Deferred, Kit, Recipe
from mmspec.targets.continuous.forecast_schedule import Stepwise
from mmspec.verifiers.first_block import FirstBlockGate


def residual_gate(kit: Kit) -> FirstBlockGate:
    """The threshold of the cache."""
    return FirstBlockGate(kit.options["threshold"])


RECIPE = Recipe(
    architecture=first_block_cache,
    execution=Stepwise(walk="first block, per step"),
    verifier=Deferred(residual_gate, "change of the first block's residual", kinds=()),
    sees="target-memory",
    options={"threshold": 0.05},
    paper="diffusers; after Liu et al. 2025",
    decodes="latents",
)
