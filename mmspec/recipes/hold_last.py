"""Hold last: the robot's last action is proposed again.

The baseline that every recipe of actions must beat: it needs no weights and costs nothing. Exact,
so that it wins only where a robot repeats itself to the bin; `hold-last-tolerance` is the one to
put beside recipes with a tolerance. The first action after a reset is decoded as it is.
"""

from mmspec.drafters.actions.history import hold_last
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=hold_last,
    execution=Chain(Fixed(64)),
    verifier=Coupled(),
    paper="a baseline of this toolkit, 2026",
    decodes="actions",
)
