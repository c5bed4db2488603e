"""Worlds in which robot policies act, as Gymnasium environments (`pip install mmspec[robot]`).

Every world observes `{"image": (H, W, 3) uint8, "state": (n,) float32}`, takes an action (D,) in
physical units, and says in `info` what is asked ("instruction") and whether it is done
("is_success"). Position and grip of the hand come first and last in the state.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import gymnasium

_HOMES = {"table": ("table", "TableReach"), "metaworld": ("metaworld", "MetaWorldTask")}
WORLDS = tuple(_HOMES)


def make_world(name: str, **options: Any) -> gymnasium.Env[Any, Any]:
    """A world by its name: "table" (embedded, `TableReach`) or "metaworld" (`MetaWorldTask`).

    `options` are its own. Raises ValueError for another name, and
    where the extra [robot] is not installed.
    """
    if name not in _HOMES:
        raise ValueError(f"world {name!r} is not known; choose one of {', '.join(WORLDS)}")
    file, title = _HOMES[name]
    world: gymnasium.Env[Any, Any] = getattr(import_module(f"{__name__}.{file}"), title)(**options)
    return world
