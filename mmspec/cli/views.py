"""What `mmspec bench views` does: drafts on part of the target's memory, over visual contexts."""

from __future__ import annotations

from typing import Any

from mmspec.bench.studies.views import TOKENS, VISUAL
from mmspec.bench.studies.views import views as measure
from mmspec.cli.inputs import quiet
from mmspec.cli.loaded import set_threads
from mmspec.cli.output import emit, progress, table


def run(
    shape: str,
    visual: list[int] | None,
    tokens: list[int] | None,
    threads: int | None,
    json: bool,
    **how: Any,
) -> None:
    """Measure views of several sizes in turns, on contexts that grow."""
    quiet()
    set_threads(threads)
    with progress(json) as report:
        found = measure(
            shape, visual=visual or VISUAL, tokens=tokens or TOKENS, progress=report, **how
        )
    if json:
        emit(found.to_dict())
        return
    rows = [
        [
            one.visual,
            "all" if one.tokens is None else one.tokens,
            one.draft_ms,
            one.verify_ms,
            one.memory_mb,
        ]
        for one in found.points
    ]
    titles = ("visual tokens", "read by the draft", "draft ms", "verify ms", "memory read, MB")
    table(
        rows, *titles, heading=f"{shape}, drafts of {found.length}, {found.environment['device']}"
    )
