"""What `mmspec bench` does: recipes beside plain decoding, the library's own ways and its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmspec import bench, recipes, registry
from mmspec.api import Accelerated
from mmspec.bench.compare import Comparison
from mmspec.bench.plots import ranked
from mmspec.bench.ranking import Ranking
from mmspec.bench.row import Row
from mmspec.cli.choosing import ALL, check_files, choose
from mmspec.cli.inputs import quiet
from mmspec.cli.loaded import Loaded, load, set_threads
from mmspec.cli.options import Choice
from mmspec.cli.output import console, emit, pairs, percent, progress, short, table, times
from mmspec.modality import Selection, Workload
from mmspec.recipe import TREE

AUTO = "tree=auto"  # how a recipe is raced once more whose published shape is a tree


def run(
    choice: Choice,
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
    """Measure what was chosen, on prompts of the user or the modality's own."""
    if growth:
        _growth(choice, repeats)
        return
    check_files(out, plot, (".csv", ".md"))
    loaded = load(choice, choose(choice))
    chosen, is_all = loaded.chosen, ALL in (choice.recipe or ())
    ways, left_out = _ways(loaded, is_all)
    drafters = dict(chosen.drafters)
    if is_all and choice.tree is None and choice.length is None:
        again = _auto(loaded, ways, left_out)
        ways |= again
        drafters |= {name: drafters[fast.recipe.name] for name, fast in again.items()}
    titles = {name: _title(name, chosen.own_options.get(name, {})) for name in ways}
    ways = {titles[name]: fast for name, fast in ways.items()}
    drafters = {titles.get(name, name): drafter for name, drafter in drafters.items()}
    work = workload(loaded, prompt, prompts, batch, choice.seed)
    how: dict[str, Any] = {"peers": peers, "controls": controls, "efficiency": efficiency}
    with progress(choice.json) as report:
        found = bench.compare(
            chosen.model,
            ways,
            work,
            drafters=drafters,
            repeats=repeats,
            seed=choice.seed,
            progress=report,
            **how,
        )
    ranking = Ranking.of(found, left_out)
    if out is not None:
        ranking.write(out, plot)
    if plot is not None:
        ranked(ranking, plot)
    if is_all:
        order = {point.row.recipe: place for place, point in enumerate(ranking.points)}
        found = replace(found, rows=sorted(found.rows, key=lambda row: order.get(row.recipe, -1)))
    if choice.json:
        emit({**found.to_dict(), "left_out": left_out})
    else:
        show(found, left_out)


def _title(recipe: str, own: Mapping[str, Any]) -> str:
    """A recipe with what was set for it alone, as its row is called."""
    return ", ".join([recipe, *(f"{name}={value}" for name, value in own.items())])


def workload(
    loaded: Loaded, prompt: list[str] | None, prompts: int, batch: int, seed: int
) -> Workload:
    """What was typed, or the modality's own requests."""
    chosen = loaded.chosen
    drafter = next(iter(loaded.drafters.values()), None)
    selection = Selection(prompt, max(prompts, batch), batch, seed, drafter)
    measures = registry.measures(chosen.owner)
    return measures.workload(loaded.model, loaded.formatter, chosen.settings, selection)


def _ways(loaded: Loaded, is_all: bool) -> tuple[dict[str, Accelerated], dict[str, str]]:
    """The model under each recipe; of all recipes those that fit, and why others do not."""
    ways, left_out = dict[str, Accelerated](), dict(loaded.chosen.left_out)
    for name in loaded.chosen.recipes:
        try:
            ways[name] = loaded.fast(name)
        except ValueError as error:
            if not is_all:
                raise
            left_out[name] = str(error)
    if is_all:  # plain decoding takes part in every race
        ways.pop(loaded.chosen.owner.plain[0], None)
    return ways, left_out


def _auto(
    loaded: Loaded, ways: Mapping[str, Accelerated], left_out: dict[str, str]
) -> dict[str, Accelerated]:
    """Those whose draft model fills a published tree, once more with the tree that pays here."""
    again: dict[str, Accelerated] = {}
    for name, plan in ((name, recipes.get(name)) for name in ways):
        shaped = plan.takes_drafter and plan.execution.walk == TREE
        if not shaped or "tree" not in loaded.chosen.owner.parts:
            continue
        try:
            again[f"{name}, {AUTO}"] = loaded.fast(name, tree="auto")
        except ValueError as error:
            left_out[f"{name}, {AUTO}"] = str(error)
    return again


def show(found: Comparison, left_out: dict[str, str]) -> None:
    """The rows as a table without empty columns, and below it how they were measured."""
    lines = [*found.rows, *found.baselines, *found.controls]
    measured = [_cells(row) for row in lines if row.skipped is None]
    every = dict.fromkeys(title for cells in measured for title in cells)
    titles = [one for one in every if any(cells.get(one) is not None for cells in measured)]
    table([[cells.get(title) for title in titles] for cells in measured], *titles)
    missing = {row.recipe: row.skipped for row in lines if row.skipped is not None} | left_out
    if missing:
        console().print()
        table(list(missing.items()), "left out", "why")
    console().print()
    settings = ", ".join(f"{name} {short(value)}" for name, value in found.settings.items())
    where = ", ".join(f"{key} {value}" for key, value in found.environment.items())
    pairs(
        [
            ("model", f"{found.model} ({found.modality})"),
            ("settings", settings),
            ("timed", f"{found.requests} requests, batch {found.batch}, {found.repeats} repeats"),
            ("judged", f"{found.judged} requests"),
            ("where", where),
            *(
                (f"{row.recipe}: {name}", ", ".join(f"{k}: {short(v)}" for k, v in value.items()))
                for row in lines
                for name, value in row.extras.items()
                if isinstance(value, dict)
            ),
        ]
    )


def _cells(row: Row) -> dict[str, Any]:
    """Titles and values of a line; None = nothing to say."""
    shares = (row.prefill_share, row.draft_share, row.verify_share, row.host_share)
    return {
        "recipe": row.recipe,
        "output": None if row.exact is None else "exact" if row.exact else "lossy",
        "drafter": row.drafter,
        "target calls": row.calls,
        "fewer": _fewer(row),
        "speed-up": _ratio(row, "speedup_end_to_end"),
        "decoding only": _ratio(row, "speedup_decode"),
        "over plain": _ratio(row, "speedup_over_plain"),
        "ideal": _ratio(row, "ideal_speedup"),
        "efficiency": row.engine_efficiency,
        "acceptance length": row.mean_acceptance_length,
        "rate": None if row.draft_acceptance_rate is None else percent(row.draft_acceptance_rate),
        "tokens per call": row.tokens_per_target_call,
        "prefill, draft, verify, host": _shares(shares),
        "network rows": row.network_rows,
        "identical": None if row.identical is None else percent(row.identical),
        **{name: _quality(value) for name, value in row.qualities.items()},
        "distance": row.distance,
        **{name: value for name, value in row.extras.items() if not isinstance(value, dict)},
        "fallback": row.fallback,
    }


def _ratio(row: Row, name: str) -> str | None:
    value = getattr(row, name)
    return None if value is None else times(value, row.spread.get(name))


def _fewer(row: Row) -> str | None:
    if row.fewer_calls is None or row.fewer_calls_error is None:
        return _ratio(row, "fewer_calls")
    return f"{times(row.fewer_calls)} \u00b1 {row.fewer_calls_error:.2f}"


def _shares(values: tuple[float | None, ...]) -> str | None:
    known = [percent(value) for value in values if value is not None]
    return ", ".join(known) or None


def _quality(found: dict[str, float | None]) -> str:
    """A mean with its error, and what it is above plain decoding's."""
    shown = f"{short(found['value'])} \u00b1 {short(found['error'])}"
    gap = found["gap"]
    return shown if gap is None else f"{shown} ({gap:+.3f} to plain)"


def _growth(choice: Choice, repeats: int) -> None:
    """Host time per round at two lengths of context."""
    quiet()
    set_threads(choice.threads)
    with progress(choice.json) as report:
        found = bench.growth(repeats=repeats, progress=report)
    if choice.json:
        emit(found.to_dict())
        return
    rows = [
        (p.context, p.rounds, 1e3 * p.round_seconds, 1e3 * p.forward_seconds, 1e3 * p.host_seconds)
        for p in found.points
    ]
    table(rows, "context", "rounds", "round ms", "forwards ms", "host ms")
    console().print(f"\nhost time grows by a factor of {found.ratio:.3f}")
