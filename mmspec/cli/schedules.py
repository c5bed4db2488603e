"""`mmspec bench overlap | schedules`: drafting while the target verifies."""

from __future__ import annotations

from dataclasses import replace

from mmspec.bench.studies import overlap as overlap_study
from mmspec.bench.studies import schedules as schedules_study
from mmspec.cli.bench import workload
from mmspec.cli.models import LoadedModels, load, select
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import format_ratio, print_json, print_note, print_table, show_progress

SPEEDS = ("sequential", "windows", "buffer", "pipeline", "uncancelled")  # columns of `schedules`


def overlap(
    options: ModelOptions,
    prompt: list[str] | None,
    prompts: int,
    repeats: int,
    window: list[int] | None,
    refill: bool,
) -> None:
    """Drafting while the target verifies: both schedules at several windows, in turns."""
    if any(one < 2 for one in window or ()):
        raise ValueError(f"--window {min(window or ())} is too small; give 2 or more")
    sequential, overlapped = overlap_study.SEQUENTIAL, overlap_study.OVERLAPPED
    loaded = _load_pair(options, overlapped)
    work = workload(loaded, prompt, prompts, 1, options.seed)
    with show_progress(options.json) as report:
        found = overlap_study.overlap(
            loaded.accelerate,
            work,
            model=loaded.selection.model,
            windows=window or overlap_study.WINDOWS,
            refills=refill,
            repeats=repeats,
            seed=options.seed,
            progress=report,
        )
    if options.json:
        print_json(found.to_dict())
        return
    rows = [
        (
            one.window,
            one.draft_ms,
            one.target_ms,
            one.verify_ms,
            one.tokens_per_call,
            one.tokens_per_call_ahead,
            format_ratio(one.predicted),
            format_ratio(one.measured),
            one.identical,
        )
        for one in found.points
    ]
    titles = ("window", "draft ms", "target ms", "verify ms", "tokens/call", "ahead")
    print_table(rows, *titles, "predicted", "measured", "identical")
    print_note(
        f"{found.model}: decoding time of {sequential} over {overlapped}; predicted for two "
        "devices from component times"
    )


def schedules(
    options: ModelOptions,
    prompt: list[str] | None,
    prompts: int,
    ratio: list[float] | None,
    stages: list[int] | None,
) -> None:
    """Schedules of a draft model beside its target, on a simulated clock."""
    loaded = _load_pair(options, overlap_study.OVERLAPPED)
    work = workload(loaded, prompt, prompts, 1, options.seed)
    with show_progress(options.json) as report:
        found = schedules_study.schedules(
            loaded.accelerate,
            work,
            model=loaded.selection.model,
            ratios=ratio or schedules_study.RATIOS,
            stages=stages or schedules_study.STAGES,
            seed=options.seed,
            progress=report,
        )
    if options.json:
        print_json(found.to_dict())
        return
    rows = [
        (
            f"{one.ratio:g}",
            one.stages,
            *(format_ratio(getattr(one, name)) for name in SPEEDS),
        )
        for one in found.points
    ]
    titles = ("target / draft", "stages", "sequential", "pearl", "AMUSD", "PipeInfer")
    print_table(rows, *titles, "not cancelled")
    print_note(
        f"{found.model}: speed over plain decoding, each at its best length, of {found.tokens} "
        f"tokens, {found.agreement:.0%} of them also the draft model's"
    )


def _load_pair(options: ModelOptions, *others: str) -> LoadedModels:
    """A pair as the sequential recipe takes it, whose draft model the `others` get too."""
    sequential = overlap_study.SEQUENTIAL
    loaded = load(options, select(replace(options, recipe=[sequential])))
    selected = loaded.selection
    drafters = {**selected.drafters, **dict.fromkeys(others, selected.drafters[sequential])}
    return replace(loaded, selection=replace(selected, drafters=drafters))
