"""Hold last with tolerance: propose the last action again, accept within a few bins.

A baseline for published tolerances: at 9 to 15 bins much of a repeated action is accepted, so a
long acceptance there says little about a drafter. Lossy; `radius=0` is `hold-last`. Options as of
spec-vla: `radius` for all components, or `radii` one for each (or for each group), `metric` "bins"
or "physical" (the robot's units), `strict` components that must be equal (default: the gripper),
`keep` "draft" or "target".
"""

from mmspec.drafters.actions.history import hold_last
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Deferred, Recipe
from mmspec.verifiers.action_tolerance import KINDS, OPTIONS, build_tolerance

RECIPE = Recipe(
    architecture=hold_last,
    execution=Chain(Fixed(64)),
    verifier=Deferred(build_tolerance, "longest path within a radius of bins", kinds=KINDS),
    options=OPTIONS,
    needs=("action space",),
    paper="a baseline of this toolkit, 2026",
    decodes="actions",
)
