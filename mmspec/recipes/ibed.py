"""IbED: one draft model speaks for several views of the picture at once, and their laws are mixed.

Lee et al. 2024, "In-batch ensemble drafting: toward fast and robust speculative decoding for
multimodal language models". Views: "pixels" (M), "nothing" (T), "pooled" (P, 2 x 2 image tokens
averaged). The recorded law is the mixture, so it is exact at every temperature. All views
draft as one batch; there is no caption view.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.length import Fixed
from mmspec.drafters.neural.ensemble import uniform_ensemble
from mmspec.drafters.neural.small_model import SMALL_MODEL
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=uniform_ensemble,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    sees="pixels",
    draft_model=(SMALL_MODEL,),
    options={"views": ("pixels", "nothing", "pooled"), "weights": None},
    paper="Lee et al. 2024",
    reconstructed="no caption view",
)
