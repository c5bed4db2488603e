"""DistillSpec: a text-only draft model that was distilled on its own responses.

Zhou et al. 2024, "DistillSpec: improving speculative decoding via knowledge distillation". The
draft model is trained where it will be used: on responses that it samples, with the total variation
to the target as loss, which is 1 - acceptance (`mmspec train distillspec`). Exact; verified with
coupled noise. A draft model that reads images is not trained here.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.small_model import SMALL_MODEL, small_model
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.training.distillspec import DISTILLSPEC
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=small_model,
    execution=Chain(Fixed(5)),
    verifier=Coupled(),
    optimisation="total variation on its own responses",
    sees="nothing",
    draft_model=(SMALL_MODEL,),
    training=DISTILLSPEC,
    paper="Zhou et al. 2024",
)
