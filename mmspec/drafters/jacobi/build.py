"""Jacobi windows as recipes name them: from a kit to a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmspec.draft import Drafter
from mmspec.drafters.growth import Chain
from mmspec.drafters.jacobi.carry_over import Jacobi
from mmspec.drafters.jacobi.initial import Above, Initialiser, Left, LeftArgmax, Random, Structural
from mmspec.drafters.jacobi.suffix import (
    CoupleGumbel,
    CoupleMax,
    OneHotReuse,
    Resample,
    Suffix,
    ThresholdReuse,
)
from mmspec.drafters.jacobi.tree import Proactive
from mmspec.drafters.length import Length
from mmspec.recipe import Kit

INITIAL: Mapping[str, Initialiser] = {
    "random": Random(),
    "left": Left(),
    "left-argmax": LeftArgmax(),
    "above": Above(),
}
OPTIONS: Mapping[str, Any] = {"initial": "random"}  # what every Jacobi recipe offers


def resampled_window(kit: Kit) -> Drafter:
    """A window whose unverified tokens are drawn anew each round (SJD)."""
    return _window(kit, Resample())


def maximally_coupled_window(kit: Kit) -> Drafter:
    """A window whose unverified tokens are kept as often as their laws allow (MC-SJD)."""
    return _window(kit, CoupleMax())


def noise_sharing_window(kit: Kit) -> Drafter:
    """A window whose tokens are drawn with one noise per position (MC-SJD, Gumbel sharing)."""
    return _window(kit, CoupleGumbel())


def window_with_candidates(kit: Kit) -> Drafter:
    """A coupled window with further candidates at its first slots (SJD-PAC)."""
    proactive = Proactive(kit.options["depth"], kit.options["width"])
    return _window(kit, CoupleMax(), proactive)


REUSE: Mapping[str, Callable[[float], Suffix]] = {
    "one-hot": OneHotReuse,
    "published": ThresholdReuse,
}


def reused_window(kit: Kit) -> Drafter:
    """A window whose likely tokens are kept (SJD++)."""
    reuse = kit.options["reuse"]
    if reuse not in REUSE:
        raise ValueError(f"reuse={reuse!r} is not known; choose one of {', '.join(REUSE)}")
    return _window(kit, REUSE[reuse](kit.options["tau"]))


def initialiser(given: str | Initialiser) -> Initialiser:
    """What fills new slots, by name or as an object; forced tokens are always drafted as such."""
    if isinstance(given, str):
        if given not in INITIAL:
            raise ValueError(
                f"initial={given!r} is not known; choose one of {', '.join(INITIAL)}, or pass an "
                "object"
            )
        given = INITIAL[given]
    return Structural(given)


def _window(kit: Kit, suffix: Suffix, proactive: Proactive | None = None) -> Drafter:
    initial = initialiser(kit.options["initial"])
    return Jacobi(window_length(kit), suffix, initial, proactive=proactive)


def window_length(kit: Kit) -> Length:
    """Drafted tokens per round. Raises ValueError for a tree."""
    if not isinstance(kit.shape, Chain):
        raise ValueError("a Jacobi window is a chain; give length= instead of tree=")
    return kit.shape.length
