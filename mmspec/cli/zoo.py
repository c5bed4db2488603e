"""`mmspec zoo`: list, find and train the bundled models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspec import zoo
from mmspec.cli.inputs import quiet
from mmspec.cli.output import Json, complain, console, emit, pairs, progress, table

app = typer.Typer(help="The bundled models.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A name of `mmspec zoo list`.")]
COLUMNS = ("name", "modality", "kind", "sees", "target", "drafter", "present", "description")


@app.command("list")
def list_(json: Json = False) -> None:
    """List the models, what they see and whether they are there."""
    entries = [_row(name) for name in zoo.names()]
    if json:
        emit([dict(zip(COLUMNS, entry, strict=True)) for entry in entries])
    else:
        table(entries, *COLUMNS)


def _row(name: str) -> list[str | bool | None]:
    one = zoo.info(name)
    whose, present = zoo.modality(name).name, zoo.is_present(name)
    return [name, whose, one.kind, one.sees, one.target, one.drafter, present, one.description]


@app.command()
def path(name: Name, json: Json = False) -> None:
    """Print the folder of a model."""
    folder = str(zoo.path(name))
    if json:
        emit({"name": name, "path": folder})
    else:
        typer.echo(folder)


@app.command()
def train(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="Folder to write; the zoo's by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Cut every stage to so many.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a model that is there.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a model from a seed and measure it."""
    quiet()
    try:
        with progress(json) as bar:

            def shown(stage: str, step: int, total: int, loss: float) -> None:
                bar(stage, step, total)

            report = zoo.train(name, out, steps, seed, shown, force)
    except KeyboardInterrupt as stop:
        complain(str(stop) or "interrupted")
        raise typer.Exit(130) from stop
    if json:
        emit(report)
        return
    console().print(f"[bold]{name}[/bold]")
    pairs(list(report.items()))
