"""MC-SJD with Gumbel sharing: every position of a Jacobi window keeps one piece of noise.

So et al. 2026. Unverified tokens are argmax(log p + g) with g fixed per position, so a token stays
while its law changes little, over any number of rounds. Exact: corrections and acceptances draw
noise of their own. With verifier="coupled" the target's token is drawn with the same g, and the
output is that of plain decoding with the same seed, token for token.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.jacobi.carry_over import OPTIONS, noise_sharing_window
from mmspec.drafters.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.recursive import Recursive

RECIPE = Recipe(
    architecture=noise_sharing_window,
    execution=Chain(Fixed(31)),
    verifier=Recursive(),
    sees="target-memory",
    options=OPTIONS,
    paper="So et al. 2026",
)
