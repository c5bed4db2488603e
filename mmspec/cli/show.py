"""`mmspec show`: everything about one recipe. It answers out of their index, without torch."""

from __future__ import annotations

from typing import Annotated

import typer

from mmspec import recipes
from mmspec.cli.output import Json, console, emit, pairs


def show(
    recipe: Annotated[str, typer.Argument(help="One of `mmspec recipes`.")], json: Json = False
) -> None:
    """Show a recipe: its paper, its five parts, its options and what it needs."""
    found = recipes.about(recipe)
    if json:
        emit(found)
        return
    console().print(f"[bold]{recipe}[/bold]")
    console().print(found["description"], markup=False)
    console().print()
    rows = [(name, value) for name, value in found["parts"].items()]
    rows += [
        ("output", "exact" if found["exact"] else "lossy"),
        ("decodes", found["decodes"]),
        ("takes proposals", found["proposal kinds"] or None),
        ("drafter", "needed" if found["needs drafter"] else "none"),
        ("drafter sees", found["sees"]),
        ("compressor", found["compressor"]),
        ("options", [f"{name}={value}" for name, value in found["options"].items()] or None),
        ("paper", found["paper"] or None),
        ("reconstructed", found["reconstructed"] or None),
    ]
    pairs(rows)
