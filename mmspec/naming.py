"""Names and their parameters as people write them, and one sentence on what nobody knows."""

from __future__ import annotations

import json
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


def parameters(text: str, known: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`keep=0.25,mass=1` as values; `known` are the parameters of `name` and their defaults.

    Raises ValueError for unknown parameters, listing the known ones, and for values of another
    type than the default's.
    """
    given = {}
    for pair in filter(None, text.split(",")):
        key, _, value = pair.partition("=")
        if key not in known or not value:
            listed = ", ".join(f"{key}={default}" for key, default in known.items()) or "none"
            raise ValueError(f"{pair!r} is no parameter of {name!r}; it has {listed}")
        given[key] = _value(value, known[key], pair)
    return given


def _value(text: str, default: Any, pair: str) -> Any:
    """A number, true or false, or words; of the default's type, words where that is None."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    wanted = str if default is None else type(default)
    if type(value) is not wanted and not (wanted is float and type(value) is int):
        raise ValueError(f"{pair!r} gives no {wanted.__name__}, as in the default {default}")
    return value


def chosen(option: str, value: Any, known: Mapping[str, Part]) -> Part:
    """The part of that name, or a part of their kinds itself. Raises ValueError with the names."""
    if isinstance(value, str) and value in known:
        return known[value]
    if type(value) in {type(one) for one in known.values()}:
        return cast("Part", value)
    raise ValueError(f"{option}={value!r} is not known; choose one of {', '.join(known)}")
