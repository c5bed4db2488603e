"""`mmspec recipes`: the table of recipes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmspec.cli.output import Json, emit, table

AXES = (
    "draft architecture",
    "draft execution",
    "draft optimisation",
    "verification execution",
    "verification optimisation",
)


def recipes(
    markdown: Annotated[bool, typer.Option(help="As the README embeds it.")] = False,
    json: Json = False,
) -> None:
    """List the recipes: what each does, its five parts, exact or lossy."""
    listed = rows()
    if json:
        emit(listed)
    elif markdown:
        typer.echo(as_markdown(listed))
    else:
        lines = [
            (row["name"], law(row), row["needs drafter"], row["draft execution"], row["summary"])
            for row in listed
        ]
        table(lines, "recipe", "output", "drafter", "draft", "idea")


def rows() -> list[dict[str, Any]]:
    """One entry per recipe, from the folder."""
    from mmspec import recipes as folder

    found = []
    for name in folder.names():
        recipe = folder.get(name)
        found.append(
            {
                "name": name,
                "summary": folder.summary(name),
                **recipe.axes(),
                "exact": recipe.exact,
                "needs drafter": recipe.takes_drafter,
                "paper": recipe.paper,
            }
        )
    return found


def as_markdown(listed: list[dict[str, Any]]) -> str:
    """The recipes as a table of Markdown."""
    titles = ("recipe", "idea", *AXES, "output", "drafter", "paper")
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in listed:
        drafter = "needed" if row["needs drafter"] else "none"
        cells = [f"`{row['name']}`", row["summary"], *(row[axis] for axis in AXES)]
        cells += [law(row), drafter, row["paper"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def law(row: dict[str, Any]) -> str:
    return "exact" if row["exact"] else "lossy"
