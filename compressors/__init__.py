"""Fewer visual tokens for the draft model, one idea per file; the target keeps all of its own.

Here they are by name, for command lines and `accelerate(compressor="...")`:
"attn-topk" is one as it comes, "attn-topk:keep=0.25" one with a parameter,
"top-p-uniform:keep=0.1,mass=0.3" one with several.
"""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from mmspec.naming import parameters

if TYPE_CHECKING:
    from mmspec.compressors.contract import Compressor

SHARED = ("attending", "cells", "contract", "learned", "learned_cells", "selection")
COMPRESSORS = tuple(  # the folder is the registry: one in every other file
    sorted(
        file.name.replace("_", "-") for file in iter_modules(__path__) if file.name not in SHARED
    )
)


def kind(name: str) -> type[Any]:
    """The class of that name. Raises ValueError listing the known ones."""
    if name not in COMPRESSORS:
        near = get_close_matches(name, COMPRESSORS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        known = ", ".join(COMPRESSORS)
        raise ValueError(f"there is no compressor {name!r}{hint} known: {known}, or pass an object")
    own = import_module(f"{__name__}.{name.replace('-', '_')}")
    contract = import_module(f"{__name__}.contract").Compressor
    classes = [one for one in vars(own).values() if isinstance(one, type)]
    return next(
        one for one in classes if issubclass(one, contract) and one.__module__ == own.__name__
    )


def named(text: str) -> Compressor:
    """The compressor of that name, with the parameters behind it.

    Raises ValueError for unknown names and parameters, listing the known ones, and for values out
    of range.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is no name of a compressor; give one such as 'average-pool'")
    name, _, rest = text.partition(":")
    maker = kind(name)
    known = {one.name: one.default for one in fields(maker)}
    made: Compressor = maker(**parameters(rest, known, name))
    return made


def about(name: str) -> dict[str, Any]:
    """A compressor as plain data: what it does, needs, gives, and its parameters' defaults."""
    maker = kind(name)
    made = named(name)
    return {
        "name": name,
        "summary": (maker.__doc__ or "").strip().partition("\n")[0],
        "needs": sorted(made.needs),
        "kept of 576": made.count(576, (24, 24)),
        "places": made.places,
        "parameters": {one.name: one.default for one in fields(maker)},
        "trained": any(one.name == "weights" for one in fields(maker)),
    }
