"""OpenVLA, autoregressive: a policy says its action token by token; nothing is drafted.

Kim et al. 2024, "OpenVLA: an open-source vision-language-action model". Exact; the baseline that
every exact recipe of actions reproduces token for token, greedy or sampled, and that the time of
all others is compared with.
"""

from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.plain import no_drafter
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=no_drafter,
    execution=Chain(Fixed(1)),
    verifier=Coupled(),
    paper="Kim et al. 2024",
    decodes="actions",
)
