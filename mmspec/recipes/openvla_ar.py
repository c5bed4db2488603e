"""OpenVLA, autoregressive: plain decoding of a policy, one token per forward.

Kim et al. 2024, "OpenVLA: an open-source vision-language-action model". Exact; the baseline that
every exact recipe of actions reproduces token for token, greedy or sampled, and the reference for
all speed-ups.
"""

from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.plain import no_drafter
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=no_drafter,
    execution=Chain(Fixed(1)),
    verifier=Coupled(),
    needs=("action space",),
    paper="Kim et al. 2024",
    decodes="actions",
)
