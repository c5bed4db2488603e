"""MC-SJD with Gumbel sharing: each position of a Jacobi window keeps its noise.

So et al. 2026. Unverified tokens are argmax(log p + g) with g fixed per position, so a token stays
while its distribution changes little, over any number of rounds. Exact: corrections and acceptances
use noise of their own, and so does a step without a window (released code draws the tokens of all
such steps with one row of noise, which is biased). With verifier="coupled" the target's token is
sampled with the same g, and the output is that of plain decoding with the same seed, token for
token.
"""

from mmspec.drafters.jacobi.window import noise_sharing_window, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(
    noise_sharing_window, 31, Recursive(), needs=("image tokens",), paper="So et al. 2026"
)
