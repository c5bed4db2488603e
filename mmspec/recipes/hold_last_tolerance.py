"""Hold last with tolerance: the last action again, kept where it is within a few bins.

What published tolerances are worth by themselves: at 9 to 15 bins much of an action passes that is
the last one repeated, so that a long acceptance there says little of a drafter. Lossy;
`radius=0` is `hold-last`. Options as of spec-vla: `radius` for all components, or `radii` one for
each (or for each group), `metric` "bins" or "physical" (the robot's units), `strict` components
that must be equal (the gripper, unless said), `keep` "draft" or "target".
"""

from mmspec.drafters.actions.history import hold_last
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.recipe import Deferred, Recipe
from mmspec.verifiers.action_tolerance import KINDS, OPTIONS, within_radius

RECIPE = Recipe(
    architecture=hold_last,
    execution=Chain(Fixed(64)),
    verifier=Deferred(within_radius, "longest path within a radius of bins", kinds=KINDS),
    options=OPTIONS,
    paper="a baseline of this toolkit, 2026",
    decodes="actions",
)
