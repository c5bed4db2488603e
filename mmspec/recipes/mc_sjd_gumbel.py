"""MC-SJD with Gumbel sharing: every position of a Jacobi window keeps one piece of noise.

So et al. 2026. Unverified tokens are argmax(log p + g) with g fixed per position, so a token stays
while its distribution changes little, over any number of rounds. Exact: corrections and acceptances
draw noise of their own. With verifier="coupled" the target's token is drawn with the same g, and
the output is that of plain decoding with the same seed, token for token.
"""

from mmspec.drafters.jacobi.carry_over import noise_sharing_window, with_window
from mmspec.verifiers.recursive import Recursive

RECIPE = with_window(noise_sharing_window, 31, Recursive(), paper="So et al. 2026")
