"""TABED: an ensemble of views whose weights are chosen while decoding, by who was right so far.

"TABED: test-time adaptive ensemble drafting for robust speculative decoding in LVLMs", 2026.
After each verification the weights move to the point of a grid (step 0.1) whose mixture would
have named the target's choice most often; ties go to the smallest divergence. Exact. All views
draft as one batch; there is no caption view.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Fixed
from mmspec.drafters.neural.ensemble import tested_ensemble
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=tested_ensemble,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    sees="pixels",
    draft_model=(SMALL_MODEL,),
    options={"views": ("pixels", "nothing", "pooled"), "steps": 10, "window": 0},
    paper="TABED, 2026",
    reconstructed="no caption view",
)
