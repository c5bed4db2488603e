"""`mmspec export`: write heads and targets in layouts that engines read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli.options import DefaultGroup, placed_command, run_function
from mmspec.cli.output import Json

app = typer.Typer(
    help="Write a head, or its target, for engines: `mmspec export FORMAT HEAD` writes a head.",
    no_args_is_help=True,
    cls=DefaultGroup,
)
Out = Annotated[
    Path, typer.Option("--out", "--to", help="A new folder, of config.json and safetensors.")
]


@app.command("head")
@placed_command("dtype")
def head(
    layout: Annotated[str, typer.Argument(metavar="FORMAT", help="One of `mmspec convert`.")],
    head: Annotated[Path, typer.Argument(help="A head: its folder, or zoo:NAME.")],
    out: Out,
    target: Annotated[
        str | None, typer.Option(help="Hub name of its target, if the format names it.")
    ] = None,
    json: Json = False,
    placed: Any = None,
) -> None:
    """Write a head in a published layout, for engines that read it."""
    run_function("mmspec.cli.formats:export", layout, head, out, target, json, **placed)


@app.command("target")
def target(
    source: Annotated[
        str, typer.Argument(help="A folder, zoo:NAME, or a hub name that was downloaded before.")
    ],
    out: Out,
    layout: Annotated[
        str, typer.Option("--format", help="The engine that is to read it.")
    ] = "vllm",
    json: Json = False,
) -> None:
    """Write a target's folder under the weight names of an engine; its values stay."""
    run_function("mmspec.cli.formats:export_target", source, out, layout, json)
