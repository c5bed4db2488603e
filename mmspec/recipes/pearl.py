"""PEARL: a small model drafts the next tokens while the target verifies the last ones.

Liu et al. 2024, "PEARL: parallel speculative decoding with adaptive draft length". After a
rejection the target predicts the next token while the following window is drafted (pre-verify);
while windows are accepted, each is verified as the next one is drafted (post-verify), without a
bonus token. It helps where both run in parallel: on two devices, or on two cores. Exact; verified
with coupled noise here, where a window continues if target and drafter agree
(`verifier="rejection"` verifies windows as the paper does).
"""

from mmspec.drafters.neural.pipelined import with_pipelined_windows
from mmspec.verifiers.coupled import Coupled

RECIPE = with_pipelined_windows(
    4,
    Coupled(),
    refill=0,
    optimisation="windows drafted while the target verifies",
    paper="Liu et al. 2024",
    reconstructed="the token behind a window is the target's own, no test of the drafted one",
)
