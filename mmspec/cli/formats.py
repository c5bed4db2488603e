"""`mmspec convert` and `mmspec export`: read and write published layouts of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmspec import formats, zoo
from mmspec.cli.options import parse_pairs
from mmspec.cli.output import (
    console,
    print_json,
    print_pairs,
    print_table,
    show_status,
    silence_libraries,
)
from mmspec.draft_models import find_kinds
from mmspec.formats import targets
from mmspec.modalities.common.doctor_tokens import find_head_kind
from mmspec.models.folder import check_folder_exists
from mmspec.models.loading import model_type
from mmspec.models.own_heads import find_folder
from mmspec.models.placement import parse_dtype
from mmspec.registry import ZOO


def convert(
    name: str | None, files: list[Path], out: Path | None, overrides: list[str] | None, json: bool
) -> None:
    """Convert published files into a folder of safetensors, or list the formats."""
    if name is None:
        if out is not None or overrides:
            raise ValueError("--out and --set are of a format; name one of `mmspec convert`")
        _list_formats(json)
        return
    layout = formats.get(name)
    if out is None:
        raise ValueError(f"format {name} becomes a folder of safetensors; give --out a new one")
    _check_new(out)
    silence_libraries()
    with show_status(f"reading {layout.about}", json):
        model = formats.convert(name, files, **parse_pairs(overrides or ()))
        model.save_pretrained(out)
    sizes = sum(value.numel() for value in model.parameters())
    _report(name, {"out": str(out), "class": type(model).__name__, "parameters": sizes}, json)


def export(
    layout: str, head: Path, out: Path, target: str | None, json: bool, dtype: str | None = None
) -> None:
    """Write a head in a published layout, for engines that read it."""
    formats.get(layout)
    head = zoo.path(str(head)) if str(head).startswith(ZOO) else head
    values = None if dtype is None else parse_dtype(dtype)
    check_folder_exists(str(head), "head")
    _check_new(out)
    silence_libraries()
    kind = find_head_kind(head)
    if kind is None:
        known = dict.fromkeys(one.description for one in find_kinds("tokens", "actions"))
        raise ValueError(
            f"{head} holds a {model_type(head)}, and only heads are written in other layouts "
            f"({', '.join(known)}); models are saved by save_pretrained"
        )
    made = formats.export(layout, kind.load(head, None, values), out, target)
    sizes = sum(one.numel() for one in made.tensors.values() if one.is_floating_point())
    found = {"out": str(out), "format": layout, "weights": len(made.tensors), "parameters": sizes}
    _report(layout, found, json)


def export_target(source: str, out: Path, layout: str, json: bool) -> None:
    """Write a target under the weight names of an engine."""
    formats.get(layout)
    folder = _find_target(source)
    _check_new(out)
    renamed = targets.export_target(layout, folder, out)
    changed = sum(old != new for old, new in renamed.items())
    found = {"out": str(out), "format": layout, "weights": len(renamed), "renamed": changed}
    _report(layout, found, json)


def _find_target(source: str) -> Path:
    """The folder of a target. Raises ValueError for hub names without a local copy."""
    if source.startswith(ZOO):
        return zoo.path(source.removeprefix(ZOO))
    check_folder_exists(source)
    folder = Path(source) if Path(source).is_dir() else find_folder(source)
    if folder is None:
        raise ValueError(
            f"there is no local copy of {source}; download it (`hf download {source}`)"
        )
    return folder


def _report(title: str, found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
    else:
        console().print(f"[bold]{title}[/bold]")
        print_pairs(list(found.items()))


def _check_new(out: Path) -> None:
    """Refuse a folder that is not empty. Raises ValueError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} holds something already; give --out a new folder")


def _list_formats(json: bool) -> None:
    every = {name: formats.get(name) for name in formats.names()}
    if json:
        keys = ("about", "files", "options")
        own = {name: {key: getattr(one, key) for key in keys} for name, one in every.items()}
        print_json(
            [
                {"format": name, **own[name], "exported": one.export is not None}
                for name, one in every.items()
            ]
        )
        return
    rows = [
        [
            *(name, one.about, ", ".join(one.files), one.export is not None),
            "\n".join(map(": ".join, one.options.items())),
        ]
        for name, one in every.items()
    ]
    print_table(rows, "format", "about", "files", "exported", "--set NAME=VALUE")
