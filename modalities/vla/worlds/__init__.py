"""Gymnasium environments for robot policies (`pip install mmspec[robot]`).

Observations are `{"image": (H, W, 3) uint8, "state": (n,) float32}`, actions (D,) in physical
units; `info` has "instruction" and "is_success". The state begins with the position of the hand
and ends with the gripper.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gymnasium

_CLASSES = {
    "table": ("table", "TableReach"),
    "moving-goals": ("moving_goals", "MovingGoals"),
    "metaworld": ("metaworld", "MetaWorldTask"),
}
_HELD_OUT = ("table", "moving-goals")  # worlds with held-out scenes: split="held-out"
WORLDS = tuple(_CLASSES)


def make_world(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment: "table" (`TableReach`), "moving-goals" or "metaworld".

    "moving-goals" (`MovingGoals`) is a harder task on the same table; "metaworld" (`MetaWorldTask`)
    is simulated by MuJoCo. `options` are arguments of the class. Raises ValueError for an unknown
    name, and if the extra [robot] is not installed.
    """
    if name not in _CLASSES:
        raise ValueError(f"world {name!r} is not known; choose one of {', '.join(WORLDS)}")
    file, title = _CLASSES[name]
    world: gymnasium.Env[Any, Any] = getattr(import_module(f"{__name__}.{file}"), title)(**options)
    return world


def make_held_out_world(name: str) -> gymnasium.Env[Any, Any]:
    """An environment by name, with held-out scenes if it has any."""
    return make_world(name, **({"split": "held-out"} if name in _HELD_OUT else {}))


def import_extra(package: str) -> ModuleType:
    """Import a package of the extra [robot]. Raises ValueError naming the extra if missing."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise ValueError(
            f"robot environments need {package}, which is not installed: pip install mmspec[robot]"
        ) from None
