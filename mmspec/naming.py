"""One sentence on a name that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def unknown_message(given: Sequence[str], known: Iterable[str], where: str) -> str:
    """What was given, the nearest known keyword, and all of them."""
    names = list(known)
    near = get_close_matches(given[0], names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown keyword {', '.join(given)} for {where}{hint} known: {', '.join(names)}"
