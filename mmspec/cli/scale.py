"""What `mmspec bench scale` does: engine efficiency at a published size."""

from __future__ import annotations

from typing import Any

from mmspec import bench
from mmspec.bench.studies.shapes import SHAPES
from mmspec.cli.inputs import quiet
from mmspec.cli.loaded import set_threads
from mmspec.cli.output import console, emit, progress, table

COLUMNS = ("layers", "hidden", "heads", "key_value_heads", "vocabulary")


def run(
    shape: str,
    context: list[int] | None,
    acceptance: list[float] | None,
    threads: int | None,
    max_new_tokens: int,
    json: bool,
    **how: Any,
) -> None:
    """Measure a shape with a drafter that knows the answer, or list the shapes."""
    if shape == "list":
        _list(json)
        return
    quiet()
    set_threads(threads)
    with progress(json) as report:
        found = bench.scale(
            shape,
            contexts=tuple(context or (512, 2048)),
            rates=tuple(acceptance or (0.6, 0.8, 0.9)),
            room=max_new_tokens,
            progress=report,
            **how,
        )
    if json:
        emit(found.to_dict())
        return
    where = found.environment
    heading = (
        f"{shape}, {found.parameters / 1e9:.2f} B parameters, {where['dtype']}, {where['device']}"
    )
    rows = [[getattr(point, column) for column in found.columns] for point in found.points]
    table(rows, *(column.replace("_", " ") for column in found.columns), heading=heading)
    console().print(found.note, style="dim")


def _list(json: bool) -> None:
    if json:
        emit({name: shape.to_dict() for name, shape in SHAPES.items()})
        return
    rows = [(name, *(getattr(one, key) for key in COLUMNS)) for name, one in SHAPES.items()]
    table(rows, "shape", *(key.replace("_", " ") for key in COLUMNS))
