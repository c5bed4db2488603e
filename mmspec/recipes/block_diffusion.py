"""Block-verified diffusion: accept the longest prefix of drafted states jointly.

Soen et al. 2026, reconstructed from the abstract, from block verification of tokens (Sun et al.
2024) with densities for probabilities. Exact, and never shorter in expectation than deciding step
by step. The noise of a draft is that of its round.
"""

from mmspec.drafters.denoising.frozen import frozen_with_one_deviation, with_old_predictions
from mmspec.verifiers.gaussian_block import GaussianBlock

RECIPE = with_old_predictions(
    frozen_with_one_deviation,
    GaussianBlock(),
    paper="Soen et al. 2026; Sun et al. 2024",
    reconstructed="the whole algorithm, from its counterpart for tokens",
)
