"""`mmspec recipes` and `mmspec show`: list and show recipes, from their index, without torch."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Annotated, Any

import typer

from mmspec import recipes as folder
from mmspec import registry
from mmspec.cli.output import Json, console, print_json, print_pairs, print_table
from mmspec.modality import UNFIT, Modality

AXES = (
    "draft architecture",
    "draft execution",
    "draft optimisation",
    "verification execution",
    "verification optimisation",
)
TABLE = folder.INDEX.parents[2] / "docs" / "recipes.md"  # in a checkout
PROPOSALS = {  # names of `mmspec.draft.Kind`
    "IID": "independent samples",
    "WOR": "samples without replacement",
    "DET": "deterministic proposals",
    "HUB": "top tokens and a sample (SpecHub)",
    "RACE": "samples with the target's noise",
}


def recipes(
    modality: Annotated[
        str | None, typer.Option(help="Only those that fit models of this modality.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only those that fit this model: a folder or zoo:NAME.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="With --modality or --model: the others too, and why not.")
    ] = False,
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/recipes.md.")] = False,
    index: Annotated[
        bool, typer.Option("--index", help="Print mmspec/recipes/index.json.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write both files, in a checkout.")
    ] = False,
    json: Json = False,
) -> None:
    """List the recipes: what each does, its five parts, exact or lossy."""
    is_chosen = modality is not None or model is not None
    if index + write + markdown + json > 1 or ((index or write) and is_chosen):
        raise typer.BadParameter(
            "--index and --write are of all recipes; take one of --index, --write, --markdown, "
            "--json"
        )
    if every and not is_chosen:
        raise typer.BadParameter("--all needs --modality or --model")
    if index:
        typer.echo(folder.index(), nl=False)
        return
    if write:
        _write()
        return
    misfits = find_misfits(modality, model) if is_chosen else {}
    fitting = describe_rows([name for name in folder.names() if name not in misfits])
    others = describe_rows(misfits)
    if json:
        reasons = [{**row, "reason": misfits.get(row["name"])} for row in [*fitting, *others]]
        print_json(reasons if every else fitting)
    elif markdown:
        typer.echo(as_markdown(fitting))
    else:
        _print(fitting, {row["name"]: misfits[row["name"]] for row in others}, every)


def find_misfits(modality: str | None, model: str | None) -> dict[str, str]:
    """The recipes that models of a modality, or one model, cannot use, and why.

    A model is looked at as by `mmspec doctor`, without weights; recipes that take a draft model are
    judged by the modality alone. Raises ValueError for a model that is refused.
    """
    if model is None:
        assert modality is not None
        return _misfits_of(registry.get(modality))
    examine = import_module("mmspec.cli.doctor").examine  # imports torch
    owner, findings = examine(model, None, modality, json=False)
    refused = [one.remark for one in findings if one.verdict == "refused"]
    if refused:
        raise ValueError(f"{model} is refused: {refused[0]}")
    found = _misfits_of(owner)
    for one in findings:
        if one.check == UNFIT:
            found |= {name: one.remark for name in one.target.split(", ") if name not in found}
    return found


def _misfits_of(owner: Modality) -> dict[str, str]:
    reasons = {name: folder.find_misfit(name, owner) for name in folder.names()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def describe_rows(names: Any) -> list[dict[str, Any]]:
    """One entry per recipe, with the modalities that it fits."""
    found = []
    for name in names:
        about = folder.describe(name)
        fitting = [
            one.name
            for one in registry.modalities().values()
            if folder.find_misfit(name, one) is None
        ]
        keys = ("exact", "needs", "needs drafter", "paper", "decodes")
        own = {key: about[key] for key in keys}
        parts = {"summary": about["summary"], **about["parts"]}
        found.append({"name": name, **parts, **own, "modality": fitting})
    return found


def _print(fitting: list[dict[str, Any]], misfits: dict[str, str], every: bool) -> None:
    keys = ("name", "modality", "distribution", "needs drafter", "draft execution", "summary")
    lines = [[{**row, "distribution": distribution(row)}[key] for key in keys] for row in fitting]
    print_table(lines, "recipe", "modality", "output", "drafter", "draft", "idea")
    if every:
        console().print()
        print_table(list(misfits.items()), "does not fit", "why")
    elif misfits:
        console().print(f"\n{len(misfits)} others do not fit; --all shows why", style="dim")


def as_markdown(listed: list[dict[str, Any]]) -> str:
    """The recipes as a Markdown table."""
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


def _write() -> None:
    """Write the index and the table of the docs. Raises ValueError outside a checkout."""
    if not TABLE.is_file():
        raise ValueError(f"--write is for a checkout, and there is no {TABLE}")
    folder.INDEX.write_text(folder.index(), encoding="utf-8")
    own = sorted(folder.own_names())
    marks = ("<!-- recipes:start -->\n", "<!-- recipes:end -->")
    text = TABLE.read_text(encoding="utf-8")
    table = as_markdown(describe_rows(own)) + "\n"
    pattern = f"({re.escape(marks[0])}).*?({re.escape(marks[1])})"
    made = re.sub(pattern, lambda found: found[1] + table + found[2], text, flags=re.DOTALL)
    TABLE.write_text(made, encoding="utf-8")
    typer.echo(f"{len(own)} recipes written to {folder.INDEX} and {TABLE}")


def show(
    recipe: Annotated[str, typer.Argument(help="One of `mmspec recipes`.")], json: Json = False
) -> None:
    """Show a recipe: its paper, its five parts, its options and what it needs."""
    found = folder.describe(recipe)
    if json:
        print_json(found)
        return
    console().print(f"[bold]{recipe}[/bold]")
    console().print(found["description"], markup=False)
    console().print()
    rows = [(name, value) for name, value in found["parts"].items()]
    rows += [
        ("output", distribution(found)),
        ("decodes", found["decodes"]),
        ("verifies", [PROPOSALS[kind] for kind in found["proposal kinds"]] or None),
        ("needs", found["needs"] or None),
        ("drafter", "needed" if found["needs drafter"] else "none"),
        ("drafter sees", found["sees"]),
        ("compressor", found["compressor"]),
        ("options", [f"{name}={value}" for name, value in found["options"].items()] or None),
        ("paper", found["paper"] or None),
        ("reconstructed", found["reconstructed"] or None),
    ]
    print_pairs(rows)
