"""PEARL: a small model drafts the next tokens while the target verifies the last ones.

Liu et al. 2024, "PEARL: parallel speculative decoding with adaptive draft length". Behind a
rejection the target says the next token while the window behind it is drafted (pre-verify); while
windows are kept, each is verified as the next one is drafted (post-verify), and there is no token
beside them. It pays where both run at once: on two devices, or on two cores. Exact; verified with
coupled noise here, where a window goes on if the target says what the drafter said
(`verifier="rejection"` verifies windows as the paper does).
"""

from mmspec.drafters.neural.ahead import with_windows_ahead
from mmspec.verifiers.coupled import Coupled

RECIPE = with_windows_ahead(
    4,
    Coupled(),
    refill=0,
    optimisation="windows drafted while the target verifies",
    paper="Liu et al. 2024",
    reconstructed="the token behind a window is the target's own, no test of the drafted one",
)
