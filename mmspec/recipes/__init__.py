"""Find recipes: every file of this folder is one, its name with hyphens is the key.

Other packages add theirs by entry points of the group "mmspec.recipes": the name is the key, the
value a module with a `RECIPE`. `index.json` caches descriptions, so that light commands list them
without importing torch; an entry is used only if the hash of its file matches, else the recipe
itself is read. `mmspec recipes --write` brings the cache up to date.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmspec.errors import first_line, nearest_name

if TYPE_CHECKING:
    from mmspec.modality import Modality
    from mmspec.recipe import Recipe

GROUP = "mmspec.recipes"
INDEX = Path(__file__).parent / "index.json"
LAYOUT = b"2"  # of an entry; part of its hash, so that entries of another layout are not used


@lru_cache(maxsize=1)
def modules() -> Mapping[str, str]:
    """Map each key to its module. Raises ValueError if two recipes share a key."""
    found = own_names()
    for point in entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            raise ValueError(
                f"there are two recipes called {point.name!r}, in {found[point.name]} and in "
                f"{point.value}; rename one of them"
            )
    return dict(sorted(found.items()))


def names(*decodes: str) -> tuple[str, ...]:
    """Keys of all recipes, or of those that decode "tokens", "latents", "patches", ..."""
    for one in decodes:
        if not isinstance(one, str):
            raise ValueError(f"decodes={one!r} is not a name; give one, such as 'tokens'")
    return _list_names(*decodes)


@lru_cache(maxsize=8)
def _list_names(*decodes: str) -> tuple[str, ...]:
    return tuple(name for name in modules() if not decodes or describe(name)["decodes"] in decodes)


def get(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the nearest and all known names."""
    _module(name)  # raises for what has no hash
    return _load(name)


@lru_cache(maxsize=256)
def _load(name: str) -> Recipe:
    module = _read(name)
    try:
        recipe: Recipe = module.RECIPE
        return replace(recipe, name=name)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"recipe {name!r}: module {module.__name__} has no RECIPE that is a Recipe; fix its "
            "package, or uninstall it"
        ) from error


def check_decodes(
    recipe: Recipe, decodes: Sequence[str], model: Any, lacks: Sequence[str] = ()
) -> None:
    """Refuse a recipe for another kind of model. Raises ValueError naming those that fit.

    `decodes` are the kinds that fit, the model's own first; `model` may be its name. A recipe with
    an option that the model `lacks` is refused too.
    """
    what = model if isinstance(model, str) else f"a {type(model).__name__}"
    missing = [one for one in lacks if one in recipe.options]
    if missing:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} needs a {' and '.join(missing)}, and {what} has "
            f"none; choose one of {', '.join(names(decodes[0]))}"
        )
    if recipe.decodes not in decodes:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} decodes {recipe.decodes}, but {what} gives "
            f"{decodes[0]}; choose one of the recipes for it: {', '.join(names(*decodes))}"
        )


def find_misfit(name: str, modality: Modality) -> str | None:
    """Why no model of a modality can use a recipe, in a few words; None if it fits.

    A model may still lack what its modality offers; binding the recipe decides.
    """
    found = describe(name)
    if found["decodes"] not in modality.all_decodes:
        return f"decodes {found['decodes']}, not {modality.decodes}"
    missing = [one for one in modality.unsupported_options if one in found["options"]]
    missing += [one for one in found["needs"] if one not in (*modality.offers, *missing)]
    return f"needs {' and '.join(missing)}" if missing else None


def summary(name: str) -> str:
    """The first line of the recipe's docstring."""
    return str(describe(name)["summary"])


def describe(name: str) -> dict[str, Any]:
    """A recipe as plain data, from the index if its entry is up to date, else from its module."""
    package, entry = _module(name).rpartition(".")[0], _index().get(name)
    if entry is None or package != __name__ or entry.get("sha256") != _digest(_file(name)):
        return describe_module(name)
    return {key: value for key, value in entry.items() if key != "sha256"}


def describe_module(name: str) -> dict[str, Any]:
    """A recipe as plain data, from its module."""
    recipe, text = get(name), (_read(name).__doc__ or "").strip()
    kit = recipe.compressor
    found = {
        "name": name,
        "summary": text.partition("\n")[0],
        "description": text,
        "parts": recipe.axes(),
        "exact": recipe.exact,
        "proposal kinds": [kind.name for kind in recipe.verifier.kinds],
        "needs": [*recipe.needs],
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
    """The content of `index.json`, made from the recipes of this package."""
    own = own_names()
    entries = {name: {**describe_module(name), "sha256": _digest(_file(name))} for name in own}
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


@lru_cache(maxsize=1)
def _index() -> Mapping[str, Any]:
    """The cached entries; empty if the file cannot be read."""
    try:
        read: Mapping[str, Any] = json.loads(INDEX.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read


def own_names() -> dict[str, str]:
    """Map the recipes of this folder to their modules."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name.replace("_", "-"): f"{__name__}.{name}" for name in found}


def _file(name: str) -> Path:
    return INDEX.parent / f"{name.replace('-', '_')}.py"


def _module(name: str) -> str:
    if not isinstance(name, str) or name not in modules():
        near = nearest_name(str(name), modules())
        advice = f"did you mean {near!r}?" if near else f"known recipes: {', '.join(modules())}"
        raise ValueError(f"there is no recipe {name!r}; {advice}")
    return modules()[name]


def _read(name: str) -> ModuleType:
    """Import the module of a recipe. Raises ValueError naming one that cannot be imported."""
    module = _module(name)
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ValueError(
            f"recipe {name!r}: {module} cannot be imported ({first_line(error)}); fix its package, "
            "or uninstall it"
        ) from error


def _digest(file: Path) -> str:
    return hashlib.sha256(LAYOUT + file.read_bytes()).hexdigest()
