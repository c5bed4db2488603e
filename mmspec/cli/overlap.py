"""What `mmspec bench overlap` does: drafting while the target verifies, measured and predicted."""

from __future__ import annotations

from dataclasses import replace

from mmspec.bench.studies.overlap import OVERLAPPED, SEQUENTIAL, WINDOWS, Overlap
from mmspec.bench.studies.overlap import overlap as measure
from mmspec.cli.bench import workload
from mmspec.cli.choosing import choose
from mmspec.cli.loaded import load
from mmspec.cli.options import Choice
from mmspec.cli.output import console, emit, progress, table, times


def run(
    choice: Choice,
    prompt: list[str] | None,
    prompts: int,
    repeats: int,
    window: list[int] | None,
    refill: bool,
) -> None:
    """Both schedules at several windows, on the same prompts, in turns."""
    if any(one < 2 for one in window or ()):
        raise ValueError(f"--window {min(window or ())} is too small; give 2 or more")
    loaded = load(choice, choose(replace(choice, recipe=[SEQUENTIAL])))
    chosen = loaded.chosen
    small = {**chosen.drafters, OVERLAPPED: chosen.drafters[SEQUENTIAL]}
    paired = replace(loaded, chosen=replace(chosen, drafters=small))
    work = workload(loaded, prompt, prompts, 1, choice.seed)
    with progress(choice.json) as report:
        found = measure(
            paired.fast,
            work,
            model=chosen.model,
            windows=window or WINDOWS,
            refills=refill,
            repeats=repeats,
            seed=choice.seed,
            progress=report,
        )
    if choice.json:
        emit(found.to_dict())
    else:
        show(found)


def show(found: Overlap) -> None:
    """The points as a table."""
    rows = [
        (
            one.window,
            one.draft_ms,
            one.target_ms,
            one.verify_ms,
            one.tokens_per_call,
            one.tokens_per_call_ahead,
            times(one.predicted),
            times(one.measured),
            one.identical,
        )
        for one in found.points
    ]
    titles = ("window", "draft ms", "target ms", "verify ms", "tokens/call", "ahead")
    table(rows, *titles, "predicted", "measured", "identical")
    console().print(
        f"\n{found.model}: decoding time of {SEQUENTIAL} over {OVERLAPPED}; predicted for two "
        "devices, by a clock of component times",
        style="dim",
    )
