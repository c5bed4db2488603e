"""What `mmspec bench sweep` does: relaxed recipes over their knobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec.bench.plots import relaxed
from mmspec.bench.studies.sweep import KNOBS, Sweep
from mmspec.bench.studies.sweep import sweep as measure
from mmspec.cli.bench import workload
from mmspec.cli.choosing import check_files, choose
from mmspec.cli.loaded import load
from mmspec.cli.options import Choice
from mmspec.cli.output import console, emit, progress, short, table, times


def run(
    choice: Choice,
    prompt: list[str] | None,
    prompts: int,
    repeats: int,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Turn the knobs: calls saved, quality, distance from the target."""
    check_files(out, plot)
    named = choice.recipe or list(KNOBS)
    known = [name for name in named if name in KNOBS]
    loaded = load(choice, choose(replace(choice, recipe=known or named)))
    work = workload(loaded, prompt, prompts, 1, choice.seed)
    with progress(choice.json) as report:
        found = measure(
            named,
            loaded.fast,
            work,
            model=loaded.chosen.model,
            repeats=repeats,
            seed=choice.seed,
            progress=report,
        )
    give(choice, found, show, out, plot, relaxed)


def give(
    choice: Choice,
    found: Any,
    show: Callable[[Any], None],
    out: Path | None,
    plot: Path | None,
    draw: Callable[[Any, Path], None],
) -> None:
    """Points that were measured, as CSV and as a picture where that is wanted, then shown."""
    if out is not None:
        found.write_csv(out)
    if plot is not None:
        draw(found, plot)
    if choice.json:
        emit(found.to_dict())
    else:
        show(found)


def show(found: Sweep) -> None:
    """The points as a table."""
    rows = [
        (
            one.recipe,
            f"{one.knob} {one.value:g}",
            None if one.row.fewer_calls is None else times(one.row.fewer_calls),
            None
            if one.row.speedup_over_plain is None
            else times(one.row.speedup_over_plain, one.row.spread.get("speedup_over_plain")),
            one.row.distance,
            one.toy_distance,
            "; ".join(
                f"{name} {short(value['value'])} ({short(value['gap'])})"
                for name, value in one.row.qualities.items()
            ),
        )
        for one in found.points
    ]
    titles = ("recipe", "knob", "fewer calls", "over plain", "distance", "tiny TV")
    table(rows, *titles, "qualities (to plain)")
    settings = ", ".join(f"{name} {short(value)}" for name, value in found.settings.items())
    console().print(
        f"\n{found.model}, {settings}; {found.requests} requests timed {found.repeats} times, "
        f"{found.judged} judged",
        style="dim",
    )
