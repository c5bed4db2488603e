"""What `mmspec convert` does: weights as published become a folder that loads here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec import formats
from mmspec.cli.inputs import quiet
from mmspec.cli.options import set_pairs
from mmspec.cli.output import console, emit, pairs, table, working


def run(
    name: str | None, files: list[Path], out: Path | None, knobs: list[str] | None, json: bool
) -> None:
    """Convert files, or list the formats."""
    if name is None:
        if out is not None or knobs:
            raise ValueError("--out and --set are of a format; name one of `mmspec convert`")
        _list(json)
        return
    layout = formats.get(name)
    if out is None:
        raise ValueError(f"format {name} becomes a folder of safetensors; give --out a new one")
    check_new(out)
    quiet()
    with working(f"reading {layout.about}", json):
        model = formats.converted(name, files, **set_pairs(knobs or ()))
        model.save_pretrained(out)
    sizes = sum(value.numel() for value in model.parameters())
    found = {"out": str(out), "class": type(model).__name__, "parameters": sizes}
    if json:
        emit(found)
    else:
        console().print(f"[bold]{name}[/bold]")
        pairs(list(found.items()))


def check_new(out: Path) -> None:
    """Refuse a folder that holds anything. Raises ValueError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something already; give --out a new folder")


def _list(json: bool) -> None:
    every = {name: formats.get(name) for name in formats.names()}
    if json:
        emit([{"format": name, **_described(one)} for name, one in every.items()])
        return
    rows = [
        [
            *(name, one.about, ", ".join(one.files), one.export is not None),
            "\n".join(map(": ".join, one.options.items())),
        ]
        for name, one in every.items()
    ]
    table(rows, "format", "about", "files", "exported", "--set NAME=VALUE")


def _described(one: formats.Format) -> dict[str, Any]:
    own = {"about": one.about, "files": one.files, "options": one.options}
    return {**own, "exported": one.export is not None}
