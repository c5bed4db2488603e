"""`mmspec bench scale`: the engine at published sizes, and the list of them."""

from __future__ import annotations

from typing import Any

from mmspec import bench
from mmspec.bench.studies.shapes import SHAPES
from mmspec.cli.models import set_threads
from mmspec.cli.output import console, print_json, print_table, show_progress, silence_libraries
from mmspec.trees import Tree

COLUMNS = ("layers", "hidden", "heads", "key_value_heads", "vocabulary")


def scale(
    shape: str,
    context: list[int] | None,
    acceptance: list[float] | None,
    tree: list[int] | None,
    threads: int | None,
    max_new_tokens: int,
    json: bool,
    **sizes: Any,
) -> None:
    """Engine efficiency at a published size with an oracle drafter, or the list of sizes."""
    if shape == "list":
        _list_shapes(json)
        return
    silence_libraries()
    set_threads(threads)
    with show_progress(json) as report:
        found = bench.scale(
            shape,
            contexts=tuple(context or (512, 2048)),
            rates=tuple(acceptance or (0.6, 0.8, 0.9)),
            max_new_tokens=max_new_tokens,
            tree=Tree.branching(tree) if tree else None,
            progress=report,
            **sizes,
        )
    if json:
        print_json(found.to_dict())
        return
    environment = found.environment
    size = f"{found.parameters / 1e9:.2f} B parameters"
    heading = f"{shape}, {size}, {environment['dtype']}, {environment['device']}"
    used = [one for one in found.columns if any(getattr(p, one) is not None for p in found.points)]
    rows = [[getattr(point, column) for column in used] for point in found.points]
    print_table(rows, *(column.replace("_", " ") for column in used), heading=heading)
    console().print(found.note, style="dim")


def _list_shapes(json: bool) -> None:
    if json:
        print_json({name: shape.to_dict() for name, shape in SHAPES.items()})
        return
    rows = [(name, *(getattr(one, key) for key in COLUMNS)) for name, one in SHAPES.items()]
    print_table(rows, "shape", *(key.replace("_", " ") for key in COLUMNS))
