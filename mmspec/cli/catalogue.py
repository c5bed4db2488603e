"""What `mmspec bench compressors` does: all of them on one pair, in one race."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmspec.bench.plots import compressed
from mmspec.bench.studies.compressors import Catalogue, catalogue
from mmspec.bench.studies.kept_tokens import draw
from mmspec.cli.bench import workload
from mmspec.cli.choosing import check_apart, check_files, check_writable, choose
from mmspec.cli.loaded import load
from mmspec.cli.options import Choice
from mmspec.cli.output import console, percent, progress, table, times
from mmspec.cli.sweep import give
from mmspec.modality import PICTURE_FILES

RECIPE = "coupled"
KILOBYTE = 1e3


def run(
    choice: Choice,
    prompt: list[str] | None,
    prompts: int,
    repeats: int,
    only: list[str] | None,
    out: Path | None,
    plot: Path | None,
    picture: Path | None,
) -> None:
    """Kept tokens against acceptance, the draft model's prefill and memory, and speed."""
    check_apart({"--plot": plot, "--picture": picture})
    check_files(out, plot)
    if picture is not None:
        check_writable("--picture", picture, PICTURE_FILES)
    loaded = load(choice, choose(replace(choice, recipe=choice.recipe or [RECIPE])))
    work = workload(loaded, prompt, prompts, 1, choice.seed)
    with progress(choice.json) as report:
        found = catalogue(
            loaded.fast,
            work,
            recipe=loaded.chosen.recipe,
            compressors=only,
            model=loaded.chosen.model,
            repeats=repeats,
            seed=choice.seed,
            progress=report,
        )
    if picture is not None:
        draw({one.compressor: one.first for one in found.points if one.first}, picture)
    give(choice, found, show, out, plot, compressed)


def show(found: Catalogue) -> None:
    """One line per compressor, those that keep most first."""
    rows = [
        (
            one.compressor,
            percent(one.kept),
            one.prefill_ms,
            None if one.kv_bytes is None else one.kv_bytes / KILOBYTE,
            one.row.mean_acceptance_length,
            None if one.row.fewer_calls is None else times(one.row.fewer_calls),
            None
            if one.row.speedup_end_to_end is None
            else times(one.row.speedup_end_to_end, one.row.spread.get("speedup_end_to_end")),
            None if one.row.identical is None else percent(one.row.identical),
        )
        for one in found.points
    ]
    titles = ("compressor", "kept", "drafter prefill ms", "drafter KV KB", "acceptance length")
    table(rows, *titles, "fewer calls", "end to end", "identical")
    for name, why in found.left_out.items():
        console().print(f"left out: {name}: {why}", style="dim", markup=False)
    console().print(
        f"\n{found.model}, {found.recipe}; {found.requests} requests timed {found.repeats} times",
        style="dim",
    )
