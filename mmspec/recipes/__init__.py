"""The folder is the registry: every file is a recipe, its name with hyphens is the key."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache

from mmspec.recipe import Recipe


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Keys of all recipes."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in found))


@lru_cache(maxsize=256)
def get(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with the nearest and all known names."""
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no recipe {name!r}; {hint}known recipes: {', '.join(names())}")
    module = importlib.import_module(f"mmspec.recipes.{name.replace('-', '_')}")
    recipe: Recipe = module.RECIPE
    return replace(recipe, name=name)


def summary(name: str) -> str:
    """The first line of the recipe's docstring."""
    module = importlib.import_module(f"mmspec.recipes.{name.replace('-', '_')}")
    return (module.__doc__ or "").strip().splitlines()[0]
