"""SpecASR: draft while sure, and use again what stood behind a mismatch.

Wei et al. 2025 (arXiv 2507.18181). A draft model that hears is in step with the target again soon
after a mismatch, so the rest of a refused draft is merged into the next one, checked in one forward
of the draft model. `Recycled(most, theta, window)` as `tree=` sets the longest draft, the
confidence below which it ends, and how far tokens may have moved (None recycles nothing). Exact.
Reconstructed: theta and window, the order in which places are looked at, and that the unsure token
is drafted.
"""

from mmspec.drafters.neural.shared_encoder import SHARED_ENCODER, ending
from mmspec.drafters.recycled import Recycled
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=ending,
    execution=Recycled(),
    verifier=Coupled(),
    sees="auto",
    draft_model=(SHARED_ENCODER,),
    paper="Wei et al. 2025",
    reconstructed="theta, the window, the order of places, and that the unsure token is drafted",
)
