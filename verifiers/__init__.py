"""Verifiers: decide which drafted tokens are accepted once the target has scored them.

A file of this folder holds one rule or walk and is found by its name: "typical" is one with default
parameters, "rank-limit:ranks=3" one with a parameter. It may be chosen if all its parameters have
defaults; a rule is walked by `Recursive`. Other packages add theirs by entry points of the group
"mmspec.verifiers": the name is the key, the value a class, or a function without arguments.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import isabstract
from typing import TYPE_CHECKING, Any

from mmspec.errors import parse_parameters

if TYPE_CHECKING:
    from mmspec.draft import Verifier

GROUP = "mmspec.verifiers"
FILES = {"rejection": "recursive", "greedy-multi-draft": "greedy_multidraft", "k-seq": "kseq"}
SHOWN = 10  # names in an error


def parse_verifier(text: str) -> Verifier:
    """The verifier of that name, with the parameters after the colon, else with defaults.

    Raises ValueError for unknown names and parameters.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a name of a verifier; give one such as 'coupled'")
    name, _, rest = text.partition(":")
    make = _find(name)
    defaults = _defaults(make)
    missing = [key for key, value in defaults.items() if value is MISSING]
    if missing:
        raise ValueError(
            f"verifier {name!r} has no default for {', '.join(missing)}; pass an object, or use a "
            "recipe that sets it"
        )
    made = make(**parse_parameters(rest, defaults, name))
    if not isinstance(made, import_module("mmspec.draft").Verifier):
        made = import_module(f"{__name__}.recursive").Recursive(made)
    verifier: Verifier = made
    return verifier


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """All names that `parse_verifier` takes. Imports the whole folder."""
    files = {file: name for name, file in FILES.items()}
    found = [point.name for point in entry_points(group=GROUP)]
    for file in (one.name for one in pkgutil.iter_modules(__path__)):
        make = _class_of(file)
        if make is not None and MISSING not in _defaults(make).values():
            found.append(files.get(file, file.replace("_", "-")))
    return tuple(sorted(found))


def _find(name: str) -> Callable[..., Any]:
    """The class of that name, or the function of an entry point. Raises ValueError for others."""
    for point in entry_points(group=GROUP):
        if point.name == name:
            make: Callable[..., Any] = point.load()
            return make
    file = FILES.get(name, name.replace("-", "_"))
    is_file = name not in FILES.values() and file in {
        one.name for one in pkgutil.iter_modules(__path__)
    }
    found = _class_of(file) if is_file else None
    if found is None:
        near = get_close_matches(name, names(), n=SHOWN, cutoff=0.3) or names()[:SHOWN]
        raise ValueError(
            f"there is no verifier {name!r}; some of {len(names())}: {', '.join(near)}; see "
            "mmspec.verifiers.names(), or pass an object"
        )
    return found


def _class_of(file: str) -> type[Any] | None:
    """The verifier that a file defines, else its rule; None for a file of helpers."""
    draft, module = import_module("mmspec.draft"), import_module(f"{__name__}.{file}")
    own = [one for one in vars(module).values() if isinstance(one, type)]
    own = [one for one in own if one.__module__ == module.__name__ and one.__name__[0] != "_"]
    bases = {base for one in own for base in one.__bases__}
    own = [one for one in own if one not in bases and not isabstract(one)]
    whole = [one for one in own if issubclass(one, draft.Verifier)]
    rules = [one for one in own if _has(one, draft.Rule) or _has(one, draft.RuleSchedule)]
    return next(iter([*whole, *rules]), None)


def _has(kind: type[Any], contract: type[Any]) -> bool:
    """Whether a class has all members of a protocol."""
    return all(hasattr(kind, name) for name in vars(contract) if name[0] != "_")


def _defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a class and their defaults; MISSING where there is none."""
    if not is_dataclass(make):
        return {}
    return {
        one.name: one.default if one.default_factory is MISSING else one.default_factory()
        for one in fields(make)
        if one.init
    }
