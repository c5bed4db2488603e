"""`mmspec show`: everything about one recipe."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from mmspec.cli.output import Json, console, emit, pairs


def show(
    recipe: Annotated[str, typer.Argument(help="One of `mmspec recipes`.")], json: Json = False
) -> None:
    """Show a recipe: its paper, its five parts, its options and what it needs."""
    found = describe(recipe)
    if json:
        emit(found)
        return
    console().print(f"[bold]{recipe}[/bold]")
    console().print(found["description"], markup=False)
    console().print()
    rows = [(name, value) for name, value in found["parts"].items()]
    rows += [
        ("output", "exact" if found["exact"] else "lossy"),
        ("takes proposals", found["proposal kinds"]),
        ("drafter", "needed" if found["needs drafter"] else "none"),
        ("drafter sees", found["sees"]),
        ("compressor", found["compressor"]),
        ("options", [f"{name}={value}" for name, value in found["options"].items()] or None),
        ("paper", found["paper"] or None),
        ("reconstructed", found["reconstructed"] or None),
    ]
    pairs(rows)


def describe(name: str) -> dict[str, Any]:
    """A recipe as plain data."""
    from mmspec import recipes

    recipe = recipes.get(name)
    module = import_module(f"mmspec.recipes.{name.replace('-', '_')}")
    return {
        "name": name,
        "description": (module.__doc__ or "").strip(),
        "parts": recipe.axes(),
        "exact": recipe.exact,
        "proposal kinds": [kind.name for kind in recipe.verifier.kinds],
        "needs drafter": recipe.takes_drafter,
        "sees": recipe.sees,
        "compressor": None if recipe.compressor is None else repr(recipe.compressor),
        "options": dict(recipe.options),
        "paper": recipe.paper,
        "reconstructed": recipe.reconstructed,
    }
