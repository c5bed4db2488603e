"""`mmspec zoo`: list, find and train the bundled models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspec import zoo
from mmspec.cli.output import (
    Json,
    console,
    print_error,
    print_json,
    print_pairs,
    print_table,
    show_progress,
    silence_libraries,
)

app = typer.Typer(help="The bundled models.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="A name of `mmspec zoo list`.")]
COLUMNS = ("name", "modality", "kind", "sees", "target", "drafter", "present", "description")


@app.command("list")
def list_(json: Json = False) -> None:
    """List the models, what they read and whether they are present."""
    entries = [_row(name) for name in zoo.names()]
    if json:
        print_json([dict(zip(COLUMNS, entry, strict=True)) for entry in entries])
    else:
        print_table(entries, *COLUMNS)


def _row(name: str) -> list[str | bool | None]:
    one = zoo.info(name)
    modality, present = zoo.modality(name).name, zoo.is_present(name)
    return [name, modality, one.kind, one.sees, one.target, one.drafter, present, one.description]


@app.command()
def path(name: Name, json: Json = False) -> None:
    """Print the folder of a model."""
    folder = str(zoo.path(name))
    if json:
        print_json({"name": name, "path": folder})
    else:
        typer.echo(folder)


@app.command()
def train(
    name: Name,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: the folder of the bundled model.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10**8, help="Steps of every stage at most.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing model.")] = False,
    json: Json = False,
) -> None:
    """Train a model from a seed and measure it."""
    silence_libraries()
    try:
        with show_progress(json) as bar:

            def report_step(stage: str, step: int, total: int, loss: float) -> None:
                bar(stage, step, total)

            report = zoo.train(name, out, steps, seed, report_step, force)
    except KeyboardInterrupt as stop:
        print_error(str(stop) or "interrupted")
        raise typer.Exit(130) from stop
    if json:
        print_json(report)
        return
    console().print(f"[bold]{name}[/bold]")
    print_pairs(list(report.items()))
