"""Names and their parameters as people write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
