"""The folder is the registry: every file is a recipe, its name with hyphens is the key.

Other packages add theirs by entry points of the group "mmspec.recipes": the name is the key, and
what it points to is a module with a `RECIPE`. What recipes are about stands in `index.json` too,
so that it can be listed without importing torch; an entry whose file has changed is not believed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmspec.errors import first_line

if TYPE_CHECKING:
    from mmspec.recipe import Recipe

GROUP = "mmspec.recipes"
INDEX = Path(__file__).parent / "index.json"


@lru_cache(maxsize=1)
def modules() -> Mapping[str, str]:
    """The module of each recipe, by key. Raises ValueError where two share one."""
    found = _own()
    for point in entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            raise ValueError(
                f"there are two recipes called {point.name!r}, in {found[point.name]} and in "
                f"{point.value}; rename one of them"
            )
    return dict(sorted(found.items()))


@lru_cache(maxsize=8)
def names(*decodes: str) -> tuple[str, ...]:
    """Keys of all recipes, or of those that decode "tokens", "latents", "patches", ..."""
    return tuple(name for name in modules() if not decodes or about(name)["decodes"] in decodes)


@lru_cache(maxsize=256)
def get(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the nearest and all known names."""
    module = _read(name)
    try:
        recipe: Recipe = module.RECIPE
        return replace(recipe, name=name)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"recipe {name!r}: module {module.__name__} has no RECIPE that is a Recipe; mend the "
            "package that it is of, or uninstall that"
        ) from error


def check_decodes(
    recipe: Recipe, decodes: Sequence[str], model: Any, lacks: Sequence[str] = ()
) -> None:
    """Refuse a recipe for models of another sort. Raises ValueError naming those that fit.

    `decodes` are the sorts that fit, the model's own first; `model` may be the name of one. A
    recipe with an option that the model `lacks` does not fit either.
    """
    what = model if isinstance(model, str) else f"a {type(model).__name__}"
    missing = [one for one in lacks if one in recipe.options]
    if missing:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} goes by a {' and '.join(missing)}, and {what} has "
            f"none; choose one of {', '.join(names(decodes[0]))}"
        )
    if recipe.decodes not in decodes:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} decodes {recipe.decodes}, but {what} gives "
            f"{decodes[0]}; choose one of the recipes for it: {', '.join(names(*decodes))}"
        )


def summary(name: str) -> str:
    """The first line of the recipe's docstring."""
    return str(about(name)["summary"])


def about(name: str) -> dict[str, Any]:
    """A recipe as plain data: out of the index, or out of its module where that is not in it."""
    _module(name)  # refuses what there is not
    entry = _index().get(name)
    if entry is None or name not in _own() or entry.get("sha256") != _digest(_file(name)):
        return described(name)
    return {key: value for key, value in entry.items() if key != "sha256"}


def described(name: str) -> dict[str, Any]:
    """A recipe as plain data, out of its module."""
    recipe, words = get(name), (_read(name).__doc__ or "").strip()
    kit = recipe.compressor
    found = {
        "name": name,
        "summary": words.partition("\n")[0],
        "description": words,
        "parts": recipe.axes(),
        "exact": recipe.exact,
        "proposal kinds": [kind.name for kind in recipe.verifier.kinds],
        "needs drafter": recipe.takes_drafter,
        "sees": recipe.sees,
        "compressor": None if kit is None else repr(kit),
        "options": dict(recipe.options),
        "paper": recipe.paper,
        "reconstructed": recipe.reconstructed,
        "decodes": recipe.decodes,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found, default=repr))
    return plain


def index() -> str:
    """The file `index.json` as it must be, read from the recipes of this package themselves."""
    entries = {name: {**described(name), "sha256": _digest(_file(name))} for name in _own()}
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


@lru_cache(maxsize=1)
def _index() -> Mapping[str, Any]:
    """What was written down; nothing where that cannot be read, so that modules are."""
    try:
        read: Mapping[str, Any] = json.loads(INDEX.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read


def _own() -> dict[str, str]:
    """Recipes of this folder and their modules."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name.replace("_", "-"): f"{__name__}.{name}" for name in found}


def _file(name: str) -> Path:
    return INDEX.parent / f"{name.replace('-', '_')}.py"


def _module(name: str) -> str:
    if not isinstance(name, str) or name not in modules():
        near = get_close_matches(str(name), modules(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(modules())
        raise ValueError(f"there is no recipe {name!r}; {hint}known recipes: {known}")
    return modules()[name]


def _read(name: str) -> ModuleType:
    """The module of a recipe. Raises ValueError naming one that cannot be imported."""
    module = _module(name)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"recipe {name!r}: {module} cannot be imported ({first_line(error)}); mend the package "
            "that it is of, or uninstall that"
        ) from error


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
