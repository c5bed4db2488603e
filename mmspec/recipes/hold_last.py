"""Hold last: propose the robot's last action again.

The baseline of all recipes of actions; it needs no weights. Exact, so it helps only if actions
repeat to the bin; compare recipes with a tolerance with `hold-last-tolerance`. The first action
after a reset is decoded plainly.
"""

from mmspec.drafters.actions.history import hold_last
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=hold_last,
    execution=Chain(Fixed(64)),
    verifier=Coupled(),
    needs=("action space",),
    paper="a baseline of this toolkit, 2026",
    decodes="actions",
)
