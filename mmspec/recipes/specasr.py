"""SpecASR: draft while confident, and recycle the tokens after a mismatch.

Wei et al. 2025 (arXiv 2507.18181). A draft model with audio input agrees with the target again soon
after a mismatch, so the rest of a rejected draft is merged into the next one, checked in one
forward of the draft model. `RecyclingChain(most, theta, window)` as `tree=` sets the longest draft,
the confidence below which it ends, and how far tokens may have moved (None recycles nothing).
Exact. Reconstructed: theta and window, the order of positions, and that the token of low confidence
is drafted.
"""

from mmspec.drafters.neural.shared_encoder import SHARED_ENCODER, ending
from mmspec.drafters.recycling_chain import RecyclingChain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=ending,
    execution=RecyclingChain(),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SHARED_ENCODER,),
    needs=("speech encoder",),
    paper="Wei et al. 2025",
    reconstructed="theta, the window, the order of places, and that the unsure token is drafted",
)
