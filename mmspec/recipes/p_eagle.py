"""P-EAGLE: an EAGLE-3 head with slots of unknown tokens drafts a chain in one run.

Hui et al. 2026, "P-EAGLE: parallel-drafting EAGLE with scalable training". The drafter is a
`mmspec.models.heads.p_eagle.PEagleHead`, trained by `mmspec.training.p_eagle.P_EAGLE`. The k-th
token of a draft is predicted without the ones before it, so a draft costs one run of the head where
`eagle-3` needs k. The chain is verified by rejection. Exact, with any head.
"""

from mmspec.drafters.neural.feature_head import with_head
from mmspec.drafters.neural.p_eagle import P_EAGLE_HEAD
from mmspec.drafters.parallel_chain import ParallelChain
from mmspec.training.p_eagle import P_EAGLE
from mmspec.verifiers.recursive import Recursive

RECIPE = with_head(
    ParallelChain(),
    Recursive(),
    P_EAGLE_HEAD,
    optimisation="cross entropy of all depths in one run, fewer of the deeper ones",
    training=P_EAGLE,
    paper="Hui et al. 2026",
)
