"""Lengths and trees by name: "entropy" is `Entropy()`, "entropy:h=0.4" is `Entropy(h=0.4)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from mmspec.errors import parse_parameters

SIMPLE = (bool, int, float, str)  # types of parameters that a name can give


def make_named(text: Any, homes: Mapping[str, str], package: str) -> Any | None:
    """Make what a name stands for, with the parameters after its colon; None for other names.

    `homes` has the module of `package` and the class of every name; modules are imported on use.
    Raises ValueError for parameters that are unknown or missing, and as the class does.
    """
    name, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name not in homes:
        return None
    home, _, kind = homes[name].partition(".")
    make = getattr(import_module(f"{package}.{home}"), kind)
    own = {one.name: one.default for one in fields(make) if one.init}
    known = {key: one for key, one in own.items() if one is MISSING or type(one) in SIMPLE}
    required = {key: "FILE" for key, one in known.items() if one is MISSING}
    given = parse_parameters(rest, known | required, name)
    if missing := [key for key in required if key not in given]:
        raise ValueError(
            f"{name!r} has no default for {', '.join(missing)}; give it after the name, as in "
            f"{name}:{missing[0]}={required[missing[0]]}"
        )
    return make(**given)
