"""Kalman: a filter over the robot's last actions proposes the next one.

The drafter of KERV by itself (Zheng et al. 2026): component by component, the gripper held.
`motion` is "constant_velocity" or "random_walk", or a filter with constants of its own; `window` is
how many actions it looks at. Exact. Needs no weights. Reconstructed: the constants of constant
velocity.
"""

from mmspec.drafters.actions.kalman import kalman
from mmspec.drafters.growth import Chain
from mmspec.drafters.lengths.length import Fixed
from mmspec.recipe import Recipe
from mmspec.verifiers.coupled import Coupled

RECIPE = Recipe(
    architecture=kalman,
    execution=Chain(Fixed(64)),
    verifier=Coupled(),
    options={"motion": "constant_velocity", "window": 10},
    paper="Zheng et al. 2026",
    reconstructed="the constants of constant velocity",
    decodes="actions",
)
