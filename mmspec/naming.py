"""Names that stand for something, and one sentence on those that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, cast

Part = TypeVar("Part")


def unknown_message(given: Sequence[str], known: Iterable[str], where: str) -> str:
    """What was given, the nearest known keyword, and all of them."""
    names = list(known)
    near = get_close_matches(given[0], names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown keyword {', '.join(given)} for {where}{hint} known: {', '.join(names)}"


def chosen(option: str, value: Any, known: Mapping[str, Part]) -> Part:
    """The part of that name, or a part of their kinds itself. Raises ValueError with the names."""
    if isinstance(value, str) and value in known:
        return known[value]
    if type(value) in {type(one) for one in known.values()}:
        return cast("Part", value)
    raise ValueError(f"{option}={value!r} is not known; choose one of {', '.join(known)}")
