"""`mmspec bench sweep | compressors | views | rules | trees`, and all compressors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec import recipes
from mmspec.bench.plots import plot_compressors, plot_frontier, plot_relaxations
from mmspec.bench.row import Row
from mmspec.bench.studies import compressors as compressor_study
from mmspec.bench.studies import frontier as frontier_study
from mmspec.bench.studies import rules as rule_study
from mmspec.bench.studies import sweep as sweep_study
from mmspec.bench.studies import trees as tree_study
from mmspec.bench.studies import views as views_study
from mmspec.bench.studies.kept_tokens import draw
from mmspec.cli.bench import workload
from mmspec.cli.models import check_distinct, check_files, check_writable, load, select, set_threads
from mmspec.cli.options import IMAGE_MODEL, ModelOptions
from mmspec.cli.output import (
    console,
    format_percent,
    format_ratio,
    format_value,
    print_json,
    print_note,
    print_table,
    show_progress,
    silence_libraries,
)
from mmspec.compressors import COMPRESSORS, describe
from mmspec.modality import PICTURE_FILES

SWEPT = (*sweep_study.OPTIONS, *frontier_study.LATENT_RECIPES)  # recipes of `bench sweep`
COMPRESSED = "coupled"  # the default recipe of `bench compressors`
KILOBYTE = 1e3
# columns of a sweep of episodes; a CSV has all
SHOWN = ("success", "McNemar only this", "McNemar only plain", "McNemar p")


def sweep(
    options: ModelOptions,
    prompt: list[str] | None,
    prompts: int,
    batch: int,
    repeats: int,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Vary the options of relaxed recipes: calls saved, quality, distance from the target."""
    check_files(out, plot)
    is_open = options.model is None and options.modality is None
    if is_open and not {*(options.recipe or ())} & {*frontier_study.LATENT_RECIPES}:
        options = replace(options, model=IMAGE_MODEL)
    names = options.recipe or _list_relaxed(options)
    known = [name for name in names if name in SWEPT]
    loaded = load(options, select(replace(options, recipe=known or names)))
    work = workload(loaded, prompt, prompts, batch, options.seed)
    study: Callable[..., Any]
    study = frontier_study.measure_frontier if work.fewer_steps else sweep_study.sweep
    with show_progress(options.json) as report:
        found = study(
            names,
            loaded.accelerate,
            work,
            model=loaded.selection.model,
            repeats=repeats,
            seed=options.seed,
            progress=report,
        )
    if work.fewer_steps:
        _write(options, found, _print_frontier, out, plot, plot_frontier)
    else:
        _write(options, found, _print_sweep, out, plot, plot_relaxations)


def _list_relaxed(options: ModelOptions) -> list[str]:
    """All recipes with a parameter to vary that decode what the model does, and fit it."""
    owner = select(replace(options, recipe=None)).owner
    decoding = [name for name in SWEPT if recipes.describe(name)["decodes"] == owner.decodes]
    found = [name for name in decoding if recipes.find_misfit(name, owner) is None]
    if not found:
        raise ValueError(
            f"no relaxed recipe with a parameter decodes {owner.decodes}; those that are known: "
            f"{', '.join(SWEPT)}"
        )
    return found


def _print_frontier(found: frontier_study.Frontier) -> None:
    rows = [
        (
            one.recipe,
            f"{one.option} {one.value:g}",
            one.row.calls,
            None if one.work is None else format_percent(one.work),
            one.distance,
            one.row.speedup_end_to_end,
            None if one.beaten_by is None else f"{one.beaten_by} steps",
        )
        for one in found.points
    ]
    titles = ("recipe", "option", "calls", "work", "PSNR on ink", "speed-up", "beaten by")
    print_table(rows, *titles)
    for name, why in found.left_out.items():
        console().print(f"left out: {name}: {why}", style="dim", markup=False)
    print_note(f"{found.model}, {found.steps:g} steps; {found.requests} requests")


def _print_sweep(found: sweep_study.Sweep) -> None:
    rows = [
        (
            one.recipe,
            f"{one.option} {one.value:g}",
            _ratio(one.row, "fewer_calls"),
            _ratio(one.row, "speedup_over_plain"),
            one.row.distance,
            one.toy_distance,
            "; ".join(
                f"{name} {format_value(value['value'])} ({format_value(value['gap'])})"
                for name, value in one.row.qualities.items()
            ),
            "; ".join(
                f"{name} {format_value(value)}"
                for name, value in sweep_study.flatten(one.row.extras).items()
                if name in SHOWN
            )
            or None,
        )
        for one in found.points
    ]
    titles = ["recipe", "parameter", "fewer calls", "over plain", "distance", "tiny TV"]
    titles += ["qualities (to plain)", "episodes"]
    shown = len(titles) if any(row[-1] for row in rows) else len(titles) - 1
    print_table([row[:shown] for row in rows], *titles[:shown])
    settings = ", ".join(f"{name} {format_value(value)}" for name, value in found.settings.items())
    print_note(
        f"{found.model}, {settings}; {found.requests} requests timed {found.repeats} times, "
        f"{found.judged} judged"
    )


def compare_compressors(
    options: ModelOptions,
    prompt: list[str] | None,
    prompts: int,
    repeats: int,
    only: list[str] | None,
    out: Path | None,
    plot: Path | None,
    picture: Path | None,
) -> None:
    """Compressors on one pair: kept tokens, acceptance, the draft model's prefill, speed."""
    check_distinct({"--plot": plot, "--picture": picture})
    check_files(out, plot)
    if picture is not None:
        check_writable("--picture", picture, PICTURE_FILES)
    loaded = load(options, select(replace(options, recipe=options.recipe or [COMPRESSED])))
    work = workload(loaded, prompt, prompts, 1, options.seed)
    with show_progress(options.json) as report:
        found = compressor_study.catalogue(
            loaded.accelerate,
            work,
            recipe=loaded.selection.recipe,
            compressors=only,
            model=loaded.selection.model,
            repeats=repeats,
            seed=options.seed,
            progress=report,
        )
    if picture is not None:
        draw({one.compressor: one.first for one in found.points if one.first}, picture)
    _write(options, found, _print_compressors, out, plot, plot_compressors)


def _print_compressors(found: compressor_study.Catalogue) -> None:
    rows = [
        (
            one.compressor,
            format_percent(one.kept),
            one.prefill_ms,
            None if one.kv_bytes is None else one.kv_bytes / KILOBYTE,
            one.row.mean_acceptance_length,
            _ratio(one.row, "fewer_calls"),
            _ratio(one.row, "speedup_end_to_end"),
            None if one.row.identical is None else format_percent(one.row.identical),
        )
        for one in found.points
    ]
    titles = ("compressor", "kept", "drafter prefill ms", "drafter KV KB", "acceptance length")
    print_table(rows, *titles, "fewer calls", "end to end", "identical")
    for name, why in found.left_out.items():
        console().print(f"left out: {name}: {why}", style="dim", markup=False)
    print_note(
        f"{found.model}, {found.recipe}; {found.requests} requests timed {found.repeats} times"
    )


def list_compressors(json: bool) -> None:
    """The list of compressors: parameters, what each needs, how many tokens it keeps."""
    listed = [describe(name) for name in COMPRESSORS]
    if json:
        print_json(listed)
        return
    lines = [
        [
            one["name"],
            [f"{name}={value}" for name, value in one["parameters"].items()] or None,
            [*one["needs"], *(["weights"] if one["trained"] else [])] or None,
            "varies" if one["kept of 576"] is None else one["kept of 576"],
            one["places"],
            one["summary"],
        ]
        for one in listed
    ]
    print_table(lines, "compressor", "parameters", "needs", "kept of 24 x 24", "position", "idea")


def views(
    shape: str,
    visual: list[int] | None,
    tokens: list[int] | None,
    threads: int | None,
    json: bool,
    **sizes: Any,
) -> None:
    """Drafts on part of the target's cache, in turns, as visual contexts grow."""
    silence_libraries()
    set_threads(threads)
    visual, tokens = visual or [*views_study.VISUAL], tokens or [*views_study.TOKENS]
    with show_progress(json) as report:
        found = views_study.views(shape, visual=visual, tokens=tokens, progress=report, **sizes)
    if json:
        print_json(found.to_dict())
        return
    rows = [
        (
            one.visual,
            "all" if one.tokens is None else one.tokens,
            one.draft_ms,
            one.verify_ms,
            one.memory_mb,
        )
        for one in found.points
    ]
    titles = ("visual tokens", "read by the draft", "draft ms", "verify ms", "memory read, MB")
    heading = f"{shape}, drafts of {found.length}, {found.environment['device']}"
    print_table(rows, *titles, heading=heading)


def compare_rules(
    vocabulary: int,
    siblings: list[int] | None,
    pairs: int,
    noise: float,
    seed: int,
    json: bool,
) -> None:
    """Acceptance of rules for several drafts, beside the bound of optimal transport."""
    with show_progress(json) as report:
        found = rule_study.compare_rules(
            vocabulary, tuple(siblings or (1, 2, 3)), pairs, noise, seed, report
        )
    if json:
        print_json(found.to_dict())
        return
    rows = [
        (one.rule, one.drawn, one.siblings, one.accepted, one.bound, format_percent(one.share))
        for one in found.points
    ]
    print_table(rows, "rule", "drafts", "siblings", "accepted", "optimum", "of it")
    print_note(
        f"{found.pairs} pairs over {found.vocabulary} tokens; the optimum is that of the draws"
    )


def compare_trees(
    options: ModelOptions,
    prompt: list[str] | None,
    prompts: int,
    nodes: list[int] | None,
    depth: int,
) -> None:
    """Shapes of trees at equal numbers of nodes, with the prediction of Sequoia's programme."""
    loaded = load(options, select(replace(options, recipe=[tree_study.RECIPE])))
    work = workload(loaded, prompt, prompts, 1, options.seed)
    with show_progress(options.json) as report:
        found = tree_study.compare_trees(
            loaded.accelerate,
            work,
            model=loaded.selection.model,
            nodes=nodes or (8, 16, 32),
            depth=depth,
            seed=options.seed,
            progress=report,
        )
    if options.json:
        print_json(found.to_dict())
        return
    rows = [(*list(vars(one).values())[:-1],) for one in found.points]
    print_table(rows, "shape", "nodes", "drafted", "levels", "predicted", "measured")
    rates = ", ".join(format_percent(one) for one in found.rates)
    print_note(f"{found.model}: tokens per call; accepted by rank: {rates}")


def _write(
    options: ModelOptions,
    found: Any,
    show: Callable[[Any], None],
    out: Path | None,
    plot: Path | None,
    draw_plot: Callable[[Any, Path], None],
) -> None:
    """Write the measured points as CSV and as a plot, if requested, and print them."""
    if out is not None:
        found.write_csv(out)
    if plot is not None:
        draw_plot(found, plot)
    if options.json:
        print_json(found.to_dict())
    else:
        show(found)


def _ratio(row: Row, name: str) -> str | None:
    value, spread = getattr(row, name), row.spread.get(name)
    return None if value is None else format_ratio(value, None if name == "fewer_calls" else spread)
