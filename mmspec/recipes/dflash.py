"""DFlash: a block of masked tokens, denoised in one step over states of the target, drafts a chain.

Chen et al. 2026, "DFlash: block diffusion for flash speculative decoding". The drafter is a
`mmspec.models.heads.dflash.DFlashHead`, trained by `mmspec.training.dflash.DFLASH`. One pass drafts
the whole block, every token independent of the others given the context, and the chain is verified
by rejection. Exact, with any head.
"""

from mmspec.drafters.neural.dflash import DFLASH_HEAD
from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.parallel_chain import ParallelChain
from mmspec.training.dflash import DFLASH
from mmspec.verifiers.recursive import Recursive

RECIPE = with_head(
    ParallelChain(),
    Recursive(),
    DFLASH_HEAD,
    optimisation="cross entropy of a masked block, weights decreasing with distance",
    training=DFLASH,
    paper="Chen et al. 2026",
)
