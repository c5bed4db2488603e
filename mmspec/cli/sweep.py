"""`mmspec bench sweep`: relaxed recipes over their knobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli import drawing
from mmspec.cli import inputs as given
from mmspec.cli.bench_images import gallery
from mmspec.cli.generate import Codes, Drafter, Guidance, Temperature, Threads
from mmspec.cli.output import Json, console, emit, progress, table, times


def sweep(
    model: Annotated[str, typer.Option(help="A model that draws.")] = drawing.MODEL,
    drafter: Drafter = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Relaxed recipes; may be repeated, all if not said.")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="May be repeated.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of the zoo's: how many are timed.")] = 8,
    pictures: Annotated[int, typer.Option(min=0, help="How many the judge looks at.")] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    temperature: Temperature = None,
    guidance: Guidance = None,
    codes: Codes = None,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="Write the points as CSV.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them, as SVG or PNG; needs matplotlib.")
    ] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Turn the knobs of relaxed recipes: calls saved, quality, distance from the target."""
    from mmspec.bench.sweep import KNOBS
    from mmspec.bench.sweep import sweep as measure

    given.quiet()
    given.set_threads(threads, model)
    for file in (out, plot):
        if file is not None:
            given.check_folder(file)
    chosen = recipe or list(KNOBS)
    studio = drawing.load(model, drafter, [name for name in chosen if name in KNOBS])
    shown = gallery(studio, prompt, prompts, pictures, 1, seed)
    settings = drawing.settings(model, guidance, temperature, codes)
    with progress(json) as report:
        found = measure(
            chosen,
            studio.fast,
            shown,
            settings,
            model=studio.name,
            repeats=repeats,
            seed=seed,
            progress=report,
        )
    if out is not None:
        found.write_csv(out)
    if plot is not None:
        from mmspec.bench.plots import relaxed

        relaxed(found, plot)
    if json:
        emit(found.to_dict())
    else:
        show(found)


def show(found: Any) -> None:
    """The points as a table."""
    rows = [
        (
            one.recipe,
            f"{one.knob} {one.value:g}",
            times(one.fewer_calls),
            times(one.speedup_over_plain, [one.speedup_least, one.speedup_most]),
            one.over_accepted_mass,
            one.tiny_distance,
            None if one.facts_gap is None else f"{100 * one.facts_gap:+.1f}",
            f"{one.log_likelihood:.2f}",
        )
        for one in found.points
    ]
    titles = ("recipe", "knob", "fewer calls", "over plain", "over-accepted", "tiny TV")
    table(rows, *titles, "facts to plain", "log p")
    settings = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    console().print(
        f"\n{found.model}, {settings}; {found.requests} requests timed {found.repeats} times, "
        f"{found.pictures} pictures judged",
        style="dim",
    )
