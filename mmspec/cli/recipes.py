"""`mmspec recipes`: the table of recipes. It answers out of their index, without torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmspec import recipes as folder
from mmspec import registry
from mmspec.cli.output import Json, emit, table

AXES = (
    "draft architecture",
    "draft execution",
    "draft optimisation",
    "verification execution",
    "verification optimisation",
)


def recipes(
    modality: Annotated[
        str | None, typer.Option(help="Only those for models of this modality.")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="As docs/recipes.md holds it.")] = False,
    index: Annotated[
        bool, typer.Option("--index", help="As mmspec/recipes/index.json holds it.")
    ] = False,
    json: Json = False,
) -> None:
    """List the recipes: what each does, its five parts, exact or lossy."""
    if index + markdown + json > 1 or (index and modality is not None):
        raise typer.BadParameter(
            "--index is of all recipes; take one of --index, --markdown, --json"
        )
    if index:
        typer.echo(folder.index(), nl=False)
        return
    listed = rows(*(() if modality is None else registry.get(modality).all_decodes))
    if json:
        emit(listed)
    elif markdown:
        typer.echo(as_markdown(listed))
    else:
        keys = ("name", "modality", "distribution", "needs drafter", "draft execution", "summary")
        lines = [
            [{**row, "distribution": distribution(row)}[key] for key in keys] for row in listed
        ]
        table(lines, "recipe", "modality", "output", "drafter", "draft", "idea")


def rows(*decodes: str) -> list[dict[str, Any]]:
    """One entry per recipe, of all or of those that decode this."""
    takers: dict[str, list[str]] = {}
    for name, modality in registry.modalities().items():
        for sort in modality.all_decodes:
            takers.setdefault(sort, []).append(name)
    found = []
    for name in folder.names(*decodes):
        about = folder.about(name)
        whole = ("exact", "needs drafter", "paper", "decodes")
        found.append(
            {
                "name": name,
                "summary": about["summary"],
                **about["parts"],
                **{key: about[key] for key in whole},
                "modality": takers.get(about["decodes"], []),
            }
        )
    return found


def as_markdown(listed: list[dict[str, Any]]) -> str:
    """The recipes as a table of Markdown."""
    titles = ("recipe", "modality", "idea", *AXES, "output", "drafter", "paper")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in listed:
        drafter = "needed" if row["needs drafter"] else "none"
        cells = [f"`{row['name']}`", ", ".join(row["modality"]), row["summary"]]
        cells += [*(row[axis] for axis in AXES), distribution(row), drafter, row["paper"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def distribution(row: dict[str, Any]) -> str:
    return "exact" if row["exact"] else "lossy"
