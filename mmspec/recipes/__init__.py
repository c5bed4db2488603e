"""The folder is the registry: every file is a recipe, its name with hyphens is the key."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from mmspec.recipe import Recipe


@lru_cache(maxsize=4)
def names(decodes: str | None = None) -> tuple[str, ...]:
    """Keys of all recipes, or of those that decode "tokens", "latents" or "patches"."""
    found = sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))
    return tuple(name for name in found if decodes is None or get(name).decodes == decodes)


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


def check_decodes(recipe: Recipe, decodes: str, model: Any) -> None:
    """Refuse a recipe for models of the other sort. Raises ValueError naming those that fit."""
    if recipe.decodes != decodes:
        raise ValueError(
            f"recipe {recipe.name or 'custom'!r} decodes {recipe.decodes}, but a "
            f"{type(model).__name__} gives {decodes}; recipes for it: {', '.join(names(decodes))}"
        )


def summary(name: str) -> str:
    """The first line of the recipe's docstring."""
    module = importlib.import_module(f"mmspec.recipes.{name.replace('-', '_')}")
    return (module.__doc__ or "").strip().splitlines()[0]
