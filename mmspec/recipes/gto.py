"""GTO: the head of EAGLE-2 or EAGLE-3, trained further by the trees that it drafts.

Hu et al. 2026, "Bridging draft policy misalignment: group tree optimization for speculative
decoding". Head, tree and verification are those of `eagle-2`; what differs is the training
(`mmspec.training.gto`), a stage after the head's own: a reward of whole trees, the expected number
of accepted tokens, and a clipped loss of groups of them against the head as it was. The trained
head is one that `eagle-2`, or `eagle-3`, loads as before. Exact. Reconstructed: verified with
coupled noise, as in `eagle-2`.
"""

from dataclasses import replace

from mmspec.drafters.neural.feature_head import EAGLE3_HEAD, FEATURE_HEAD
from mmspec.recipes.eagle_2 import RECIPE as EAGLE_2
from mmspec.training.gto import GTO

RECIPE = replace(
    EAGLE_2,
    draft_model=(FEATURE_HEAD, EAGLE3_HEAD),
    optimisation="expected accepted tokens of its trees, after another training",
    training=GTO,
    paper="Hu et al. 2026",
)
