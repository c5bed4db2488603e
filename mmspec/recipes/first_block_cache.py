"""First-block cache: while the first block hardly changes, the others are not computed.

The cache of diffusers (after TeaCache, Liu et al. 2025, and ParaAttention), as a baseline for
speca: it checks before, with the first block, where SpeCa checks after, with the last. Lossy. A
`threshold` below 0 changes nothing.
"""

from mmspec.drafters.forecast.build import first_block_cache, residual_gate
from mmspec.drafters.forecast.gate import Stepwise
from mmspec.recipe import Recipe, Tailored

RECIPE = Recipe(
    architecture=first_block_cache,
    execution=Stepwise(check="first block, per step"),
    verifier=Tailored(residual_gate, "change of the first block's residual"),
    sees="target-memory",
    options={"threshold": 0.05},
    paper="diffusers; after Liu et al. 2025",
    decodes="latents",
)
