"""Block verification: accept or reject a drafted chain as a whole instead of token by token.

Sun et al. 2024 (ICLR 2025), algorithm 2. Exact in distribution and never shorter than speculative
sampling; the gain grows with draft length and temperature. Greedy output is the target's own.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import with_draft_model
from mmspec.drafters.shapes import Chain
from mmspec.verifiers.block import Block

RECIPE = with_draft_model(
    execution=Chain(Fixed(5)),
    verifier=Block(),
    paper="Sun et al. 2024",
)
