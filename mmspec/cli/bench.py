"""`mmspec bench`: compare recipes with plain decoding, the library's generate() and its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec import bench, recipes, registry
from mmspec.accelerated import Accelerated
from mmspec.bench.compare import Comparison
from mmspec.bench.plots import plot_ranking
from mmspec.bench.ranking import Ranking
from mmspec.bench.row import BASELINE_TITLES, Row
from mmspec.bench.workload import can_generate
from mmspec.cli.models import (
    ALL,
    LoadedModels,
    check_files,
    check_prompts,
    load,
    select,
    set_threads,
)
from mmspec.cli.options import ModelOptions
from mmspec.cli.output import (
    console,
    format_percent,
    format_ratio,
    format_value,
    print_json,
    print_pairs,
    print_table,
    show_progress,
    silence_libraries,
)
from mmspec.modality import Selection, Workload
from mmspec.recipe import TREE

COMPILED = "compiled"  # the second run of every recipe with --compile
AUTO = "tree=auto"  # the second run of a recipe whose published shape is a tree


def run(
    options: ModelOptions,
    prompt: list[str] | None,
    prompts: int,
    batch: int,
    repeats: int,
    peers: bool,
    controls: bool,
    efficiency: bool,
    growth: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Measure the selected recipes on given or bundled prompts."""
    if growth:
        _growth(options, repeats)
        return
    check_files(out, plot, (".csv", ".md"))
    named = select(options)
    check_prompts(named.owner, prompt or ())
    loaded = load(options, named)
    selected, is_all = loaded.selection, ALL in (options.recipe or ())
    models, left_out = _accelerate_all(loaded, is_all)
    drafters = dict(selected.drafters)
    if is_all and options.tree is None and options.length is None:
        repeated = _with_auto_tree(loaded, models, left_out)
        models |= repeated
        drafters |= {name: drafters[fast.recipe.name] for name, fast in repeated.items()}
    if options.compile:
        repeated = _with_compiled(loaded, models, left_out)
        models |= repeated
        drafters |= {name: drafters.get(fast.recipe.name or "") for name, fast in repeated.items()}
    titles = {name: _title(name, selected.own_options.get(name, {})) for name in models}
    models = {titles[name]: fast for name, fast in models.items()}
    drafters = {titles.get(name, name): drafter for name, drafter in drafters.items()}
    work = workload(loaded, prompt, prompts, batch, options.seed)
    if is_all:
        idle = find_idle(models, work)
        left_out |= idle
        models = {name: fast for name, fast in models.items() if name not in idle}
    with show_progress(options.json) as report:
        found = bench.compare(
            selected.model,
            models,
            work,
            drafters=drafters,
            repeats=repeats,
            seed=options.seed,
            progress=report,
            peers=peers,
            controls=controls,
            efficiency=efficiency,
        )
    left_out |= {
        row.recipe: row.skipped for row in found.baselines if row.skipped and row.recipe in models
    }
    ranking = Ranking.of(found, left_out)
    if out is not None:
        ranking.write(out, plot)
    if plot is not None:
        plot_ranking(ranking, plot)
    if is_all:
        order = {point.row.recipe: place for place, point in enumerate(ranking.points)}
        found = replace(found, rows=sorted(found.rows, key=lambda row: order.get(row.recipe, -1)))
    advice = ranking.suggest(models)
    if options.json:
        print_json({**found.to_dict(), "left_out": left_out, "advice": advice})
        return
    show(found, left_out)
    if advice is not None:
        console().print(f"\n{advice}", markup=False)


def _title(recipe: str, own: Mapping[str, Any]) -> str:
    """The name of a row: the recipe with its own options."""
    return ", ".join([recipe, *(f"{name}={value}" for name, value in own.items())])


def workload(
    loaded: LoadedModels, prompt: list[str] | None, prompts: int, batch: int, seed: int
) -> Workload:
    """Requests of the given prompts, or the modality's own."""
    owner, drafters = loaded.selection.owner, [*loaded.drafters.values()]
    drafter = next(filter(can_generate, drafters), drafters[0] if drafters else None)
    selection = Selection(prompt, max(prompts, batch), batch, seed, drafter)
    settings = loaded.selection.settings
    return registry.measures(owner).workload(loaded.model, loaded.formatter, settings, selection)


def _accelerate_all(
    loaded: LoadedModels, is_all: bool
) -> tuple[dict[str, Accelerated], dict[str, str]]:
    """The model under each recipe, and the reasons of those that do not fit.

    Raises the ValueError of a recipe that does not fit if no other one does.
    """
    models, left_out = dict[str, Accelerated](), dict(loaded.selection.left_out)
    eager = {"compile": False} if loaded.selection.options.get("compile") else {}
    for name in loaded.selection.recipes:
        try:
            models[name] = loaded.accelerate(name, **eager)
        except ValueError as error:
            if not models and name == loaded.selection.recipes[-1]:
                raise
            left_out[name] = str(error)
    if is_all:  # plain decoding is measured anyway
        models.pop(loaded.selection.owner.plain[0], None)
    return models, left_out


def find_idle(models: Mapping[str, Accelerated], work: Workload) -> dict[str, str]:
    """The reasons of those that would draft nothing on a workload, by name."""
    found = dict[str, str]()
    for name, fast in models.items():
        option = fast.recipe.idle_without
        given = option is None or fast.recipe.options[option] is not None
        if not given and option not in work.supplies:
            found[name] = (
                f"drafts nothing without {option}, so this would be plain decoding; give --set "
                f"{fast.recipe.name}.{option}=FILE"
            )
    return found


def _with_compiled(
    loaded: LoadedModels, models: Mapping[str, Accelerated], left_out: dict[str, str]
) -> dict[str, Accelerated]:
    """Plain decoding and every recipe again, with compiled blocks."""
    found: dict[str, Accelerated] = {}
    for name in (loaded.selection.owner.plain[0], *models):
        if name.endswith(AUTO):
            continue
        try:
            found[f"{name}, {COMPILED}"] = loaded.accelerate(name, compile=True)
        except ValueError as error:
            left_out[f"{name}, {COMPILED}"] = str(error)
    return found


def _with_auto_tree(
    loaded: LoadedModels, models: Mapping[str, Accelerated], left_out: dict[str, str]
) -> dict[str, Accelerated]:
    """Recipes with a draft model and a published tree, again with `tree="auto"`."""
    found: dict[str, Accelerated] = {}
    for name, plan in ((name, recipes.get(name)) for name in models):
        has_tree = plan.takes_drafter and plan.execution.walk == TREE
        if not has_tree or "tree" not in loaded.selection.owner.parts:
            continue
        try:
            found[f"{name}, {AUTO}"] = loaded.accelerate(name, tree="auto")
        except ValueError as error:
            left_out[f"{name}, {AUTO}"] = str(error)
    return found


def show(found: Comparison, left_out: dict[str, str]) -> None:
    """Print the rows as a table without empty columns, and how they were measured."""
    lines = [*found.rows, *found.baselines, *found.controls]
    measured = [_cells(row) for row in lines if row.skipped is None]
    every = dict.fromkeys(title for cells in measured for title in cells)
    titles = [one for one in every if any(cells.get(one) is not None for cells in measured)]
    print_table([[cells.get(title) for title in titles] for cells in measured], *titles)
    missing = {row.recipe: row.skipped for row in lines if row.skipped is not None} | left_out
    if missing:
        console().print()
        print_table(
            [(BASELINE_TITLES.get(name, name), why) for name, why in missing.items()],
            "left out",
            "why",
        )
    console().print()
    settings = ", ".join(f"{name} {format_value(value)}" for name, value in found.settings.items())
    where = ", ".join(f"{key} {value}" for key, value in found.environment.items())
    print_pairs(
        [
            ("model", f"{found.model} ({found.modality})"),
            ("settings", settings),
            ("timed", f"{found.requests} requests, batch {found.batch}, {found.repeats} repeats"),
            ("judged", f"{found.judged} requests"),
            ("where", where),
            *(
                (
                    f"{row.recipe}: {name}",
                    ", ".join(f"{k}: {format_value(v)}" for k, v in value.items()),
                )
                for row in lines
                for name, value in row.extras.items()
                if isinstance(value, dict)
            ),
        ]
    )


def _cells(row: Row) -> dict[str, Any]:
    """Titles and values of a line; None = no value."""
    shares = (row.prefill_share, row.draft_share, row.verify_share, row.host_share)
    return {
        "recipe": BASELINE_TITLES.get(row.recipe, row.recipe),
        "output": None if row.exact is None else "exact" if row.exact else "lossy",
        "drafter": row.drafter,
        "target calls": row.calls,
        "drafts in the prefill": row.prefill_steps or None,  # verified by it, none of the calls
        "fewer": _fewer(row),
        "speed-up": _ratio(row, "speedup_end_to_end"),
        "decoding only": _ratio(row, "speedup_decode"),
        "over plain": _ratio(row, "speedup_over_plain"),
        "ideal": _ratio(row, "ideal_speedup"),
        "efficiency": row.engine_efficiency,
        "acceptance length": row.mean_acceptance_length,
        "rate": None
        if row.draft_acceptance_rate is None
        else format_percent(row.draft_acceptance_rate),
        "tokens per call": row.tokens_per_target_call,
        "prefill, draft, verify, host": _shares(shares),
        "network rows": row.network_rows,
        "identical": None if row.identical is None else format_percent(row.identical),
        **{name: _quality(value) for name, value in row.qualities.items()},
        "distance": row.distance,
        **{name: value for name, value in row.extras.items() if not isinstance(value, dict)},
        "fallback": row.fallback,
    }


def _ratio(row: Row, name: str) -> str | None:
    value = getattr(row, name)
    return None if value is None else format_ratio(value, row.spread.get(name))


def _fewer(row: Row) -> str | None:
    if row.fewer_calls is None or row.fewer_calls_error is None:
        return _ratio(row, "fewer_calls")
    return f"{format_ratio(row.fewer_calls)} \u00b1 {row.fewer_calls_error:.2f}"


def _shares(values: tuple[float | None, ...]) -> str | None:
    known = [format_percent(value) for value in values if value is not None]
    return ", ".join(known) or None


def _quality(found: dict[str, float | None]) -> str:
    """A mean with its error, and its difference to plain decoding."""
    text = f"{format_value(found['value'])} \u00b1 {format_value(found['error'])}"
    gap = found["gap"]
    return text if gap is None else f"{text} ({gap:+.3f} to plain)"


def _growth(options: ModelOptions, repeats: int) -> None:
    """Measure host time per round at two context lengths."""
    silence_libraries()
    set_threads(options.threads)
    with show_progress(options.json) as report:
        found = bench.growth(repeats=repeats, progress=report)
    if options.json:
        print_json(found.to_dict())
        return
    rows = [
        (p.context, p.rounds, 1e3 * p.round_seconds, 1e3 * p.forward_seconds, 1e3 * p.host_seconds)
        for p in found.points
    ]
    print_table(rows, "context", "rounds", "round ms", "forwards ms", "host ms")
    console().print(f"\nhost time grows by a factor of {found.ratio:.3f}")
