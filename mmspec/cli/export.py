"""What `mmspec export` does: a head in a published layout, for engines that read that."""

from __future__ import annotations

from pathlib import Path

from mmspec import formats
from mmspec.cli.convert import check_new
from mmspec.cli.inputs import quiet
from mmspec.cli.output import console, emit, pairs
from mmspec.modalities.common.doctor_tokens import HEADS
from mmspec.models.folder import check_there
from mmspec.models.loading import model_type
from mmspec.models.reading import read


def run(layout: str, head: Path, out: Path, target: str | None, json: bool) -> None:
    """Write a head in a layout."""
    formats.get(layout)
    check_there(str(head), "head")
    check_new(out)
    quiet()
    kind = str(model_type(head))
    known = {one.config_class.model_type: one for one in HEADS}
    if kind not in known:
        raise ValueError(
            f"{head} holds a {kind}, and only heads are written in other layouts "
            f"({', '.join(known)}); models are saved by save_pretrained"
        )
    model = read(known[kind], head, kind.replace("_", " "))
    made = formats.exported(layout, model, out, target)
    found = {
        "out": str(out),
        "format": layout,
        "weights": len(made.tensors),
        "parameters": sum(one.numel() for one in made.tensors.values() if one.is_floating_point()),
    }
    if json:
        emit(found)
    else:
        console().print(f"[bold]{layout}[/bold]")
        pairs(list(found.items()))
