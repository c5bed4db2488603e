"""Kalman: a filter over the robot's last actions proposes the next one.

The drafter of KERV alone (Zheng et al. 2026): per component, the gripper constant. `motion` is
"constant_velocity" or "random_walk", or a filter with constants of its own; `window` is the number
of actions it reads. Exact. Needs no weights. Reconstructed: the constants of constant velocity.
"""

from mmspec.drafters.actions.kalman import kalman
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=kalman,
    execution=Chain(Fixed(64)),
    verifier=Coupled(),
    options={"motion": "constant_velocity", "window": 10},
    needs=("action space",),
    paper="Zheng et al. 2026",
    reconstructed="the constants of constant velocity",
    decodes="actions",
)
