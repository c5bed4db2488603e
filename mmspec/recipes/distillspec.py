"""DistillSpec: a text-only draft model that was distilled on its own responses.

Zhou et al. 2024, "DistillSpec: improving speculative decoding via knowledge distillation". The
draft model is trained where it will be used: on responses that it samples, with the total variation
to the target as loss, which is 1 - acceptance (`mmspec train distillspec`). Everything else is
recipe `spd-mllm`. Exact; verified with coupled noise. A draft model that reads images is not
trained here.
"""

from dataclasses import replace

from mmspec.recipes.spd_mllm import RECIPE as SPD_MLLM
from mmspec.training.distillspec import DISTILLSPEC

RECIPE = replace(
    SPD_MLLM,
    optimisation="total variation on its own responses",
    training=DISTILLSPEC,
    paper="Zhou et al. 2024",
)
