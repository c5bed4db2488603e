"""Compressors of visual tokens for the draft model, one idea per file; the target keeps all tokens.

Names, for command lines and `accelerate(compressor="...")`: "attn-topk" with default parameters,
"attn-topk:keep=0.25" with one parameter, "top-p-uniform:keep=0.1,mass=0.3" with several.
"""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from mmspec._renamed import rename_attributes
from mmspec.errors import parse_parameters

if TYPE_CHECKING:
    from mmspec.compressors.contract import Compressor

SHARED = ("cells", "contract", "learned", "selection")
COMPRESSORS = tuple(  # one per file of this folder, except the shared ones
    sorted(
        file.name.replace("_", "-") for file in iter_modules(__path__) if file.name not in SHARED
    )
)


def find_class(name: str) -> type[Any]:
    """The compressor class of a name. Raises ValueError listing the known names."""
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


def parse_compressor(text: str) -> Compressor:
    """The compressor of a name with optional parameters, such as "attn-topk:keep=0.25".

    Raises ValueError for unknown names and parameters, listing the known ones, and for values out
    of range.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a name of a compressor; give one such as 'average-pool'")
    name, _, rest = text.partition(":")
    maker = find_class(name)
    known = {one.name: one.default for one in fields(maker)}
    made: Compressor = maker(**parse_parameters(rest, known, name))
    return made


def describe(name: str) -> dict[str, Any]:
    """A compressor as plain data: summary, required signals, outputs, and default parameters."""
    maker = find_class(name)
    made = parse_compressor(name)
    return {
        "name": name,
        "summary": (maker.__doc__ or "").strip().partition("\n")[0],
        "needs": sorted(made.needs),
        "kept of 576": made.count(576, (24, 24)),
        "places": made.position_rule,
        "parameters": {one.name: one.default for one in fields(maker)},
        "trained": any(one.name == "weights" for one in fields(maker)),
    }


__getattr__ = rename_attributes(__name__, {"named": "parse_compressor"})
