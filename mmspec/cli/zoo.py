"""`mmspec zoo`: list, find and train the bundled models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
HEADS, TARGET = "heads", "llava-chat"
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
    name: Annotated[
        str, typer.Argument(help="A name of `mmspec zoo list`, or `heads` with --all.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: the folder of the bundled model.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, max=10**8, help="Steps of every stage at most.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing model.")] = False,
    all_heads: Annotated[
        bool, typer.Option("--all", help="With `heads`: all draft models of --target; resumes.")
    ] = False,
    target: Annotated[
        str | None, typer.Option(help="With `heads`: the target; default: llava-chat.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="CPU minutes of one core per draft model; default: 20."),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(help="Folder of the target's answers; default: in the cache.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a model from a seed and measure it."""
    if (name == HEADS) != all_heads or (target is not None and not all_heads):
        raise ValueError(
            f"`mmspec zoo train {HEADS} --all` trains all draft models of --target; give both "
            f"{HEADS} and --all, or the name of one model alone"
        )
    silence_libraries()
    budget = {"minutes": minutes, "answers": answers}
    more: dict[str, Any] = {option: value for option, value in budget.items() if value is not None}
    try:
        if all_heads:
            _train_heads(target or TARGET, out, steps, seed, force, json, more)
            return
        with show_progress(json) as bar:

            def report_step(stage: str, step: int, total: int, loss: float) -> None:
                bar(stage, step, total)

            report = zoo.train(name, out, steps, seed, report_step, force, **more)
    except KeyboardInterrupt as stop:
        print_error(str(stop) or "interrupted")
        raise typer.Exit(130) from stop
    if json:
        print_json(report)
        return
    console().print(f"[bold]{name}[/bold]")
    print_pairs(list(report.items()))


def _train_heads(
    target: str,
    out: Path | None,
    steps: int | None,
    seed: int,
    force: bool,
    json: bool,
    more: dict[str, Any],
) -> None:
    """Train the draft models of a target; print a line for each when it is done."""
    reports = []
    with show_progress(json) as bar:

        def progress(name: str) -> Any:
            def report_step(stage: str, step: int, total: int, loss: float) -> None:
                bar(f"{name}: {stage}", step, total)

            return report_step

        given = {"steps": steps, "seed": seed, "force": force, "progress": progress, **more}
        for report, is_new in zoo.train_heads(target, out=out, **given):
            reports.append(report)
            if not json:
                accepted = report.get("acceptance", {}).get("all")
                state = "trained" if is_new else "is there already"
                console().print(f"{report['name']}: {state}, {accepted} tokens per round")
    if json:
        print_json(reports)
