"""The benchmark: recipes against plain decoding and the library's own methods, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmspec.accelerated import Accelerated
from mmspec.bench.efficiency import measure_efficiency
from mmspec.bench.reporting import Progress, Report, describe_environment, peak_memory_bytes, silent
from mmspec.bench.row import Measurements, Row, make_row
from mmspec.bench.timing import Timings, time_runners
from mmspec.modality import Runner, RunResults, Speculative, Workload

PLAIN = "plain"
JUDGED_SEED = 1000  # offset of the seeds of judged requests


@dataclass(frozen=True)
class Comparison(Report):
    """What `mmspec bench` reports, for all modalities."""

    model: str
    modality: str
    rows: list[Row]  # plain decoding, then the recipes
    baselines: list[Row]  # the library's own methods, peers, and what was skipped
    controls: list[Row]  # uninformed drafters
    requests: int
    repeats: int
    judged: int  # requests of the quality measures
    batch: int
    settings: dict[str, Any]
    peak_memory_bytes: int
    environment: dict[str, Any] = field(default_factory=dict)

    def row(self, name: str) -> Row:
        """Return the row of a runner by name. Raises KeyError for unknown names."""
        return {one.recipe: one for one in (*self.rows, *self.baselines, *self.controls)}[name]


@dataclass(frozen=True)
class _Runners:
    """All runners, and why some are missing."""

    baselines: Mapping[str, Runner]
    ours: Mapping[str, Runner]  # plain decoding first
    peers: Mapping[str, Runner]
    controls: Mapping[str, Runner]
    missing: Mapping[str, str]

    @property
    def all(self) -> dict[str, Runner]:
        return {**self.baselines, **self.ours, **self.peers, **self.controls}


@torch.no_grad()
def compare(
    model: str,
    recipes: Mapping[str, Accelerated],
    workload: Workload,
    *,
    drafters: Mapping[str, str | None] | None = None,
    repeats: int = 5,
    seed: int = 0,
    peers: bool = True,
    controls: bool = False,
    efficiency: bool = True,
    progress: Progress = silent,
) -> Comparison:
    """Measure accelerated models of one target, which all decode the same requests in turns.

    `model` and `drafters` (of each recipe) are names for the report. Raises ValueError without
    recipes or requests, and where two runners share a name.
    """
    if not recipes or not workload.timed:
        raise ValueError("there is nothing to measure; give at least one recipe and one request")
    runs = _collect_runners(recipes, workload, peers, controls, seed, progress)
    found, missing = _measure(runs, workload, repeats, seed, efficiency, progress)
    device, timings = torch.device(workload.device), found.timings
    others = {**runs.baselines, **runs.peers}
    return Comparison(
        model=model,
        modality=next(iter(recipes.values())).modality.name,
        rows=[
            make_row(name, found, (drafters or {}).get(name))
            for name in runs.ours
            if name in timings
        ],
        baselines=[
            *(make_row(name, found) for name in others if name in timings),
            *(Row(name, skipped=why) for name, why in missing.items()),
        ],
        controls=[make_row(name, found) for name in runs.controls],
        requests=len(workload.timed),
        repeats=repeats,
        judged=len(workload.judged or workload.timed),
        batch=workload.batch,
        settings=dict(workload.settings),
        peak_memory_bytes=peak_memory_bytes(device),
        environment={**describe_environment(device, workload.batch), **workload.environment},
    )


def _measure(
    runs: _Runners,
    workload: Workload,
    repeats: int,
    seed: int,
    efficiency: bool,
    progress: Progress,
) -> tuple[Measurements, dict[str, str]]:
    """Time, judge and replay all runners; also return why some could not run.

    Plain decoding may fail where a baseline can replace it, and a recipe where there are others.
    """
    may_fail = {*runs.baselines, *runs.peers, *([PLAIN] if runs.baselines else [])}
    own = [name for name in runs.ours if name != PLAIN]
    may_fail |= {*own} if len(own) > 1 else set()
    device = torch.device(workload.device)
    timed = time_runners(
        runs.all,
        workload.timed,
        repeats,
        seed=seed,
        device=device,
        may_fail=may_fail,
        progress=progress,
    )
    missing = {**runs.missing, **timed.failures}
    base = next((name for name in runs.baselines if name in timed.timings), None)
    reference = PLAIN if PLAIN in timed.timings else base
    if reference is None:
        raise ValueError(f"neither plain decoding nor a baseline could run: {missing}")
    if own and not any(name in timed.timings for name in own):
        raise ValueError(f"no recipe could run; the first: {timed.failures[own[0]]}")
    judged = _run_judged(runs, timed.timings, workload, seed, progress)
    found = Measurements(workload, timed.timings, judged, reference, base)
    if not (efficiency and workload.replayed):
        return found, missing
    ours = {
        name: one
        for name, one in runs.ours.items()
        if name in timed.timings and not _is_compiled(one)
    }
    replayed = workload.timed[: workload.replayed]
    shares = measure_efficiency(ours, replayed, min(repeats, 3), seed, device, progress)
    return replace(found, efficiencies=shares), missing


def _is_compiled(runner: Runner) -> bool:
    """Whether the forwards of a runner are graphs, which run eager while they are recorded."""
    return isinstance(runner, Speculative) and bool(runner.fast.given.get("compile"))


def _collect_runners(
    recipes: Mapping[str, Accelerated],
    workload: Workload,
    peers: bool,
    controls: bool,
    seed: int,
    progress: Progress,
) -> _Runners:
    """Return all runners: baselines, plain decoding, recipes, peers and controls."""
    fast = {name: workload.fast(one) for name, one in recipes.items()}
    more, missing = dict[str, Runner](), dict(workload.missing)
    if peers and workload.peers is not None:
        found, why = workload.peers(fast, seed, progress)
        more, missing = dict(found), {**missing, **why}
    uninformed: dict[str, Runner] = {}
    if controls:
        if workload.controls is None:
            raise ValueError(
                "this modality decodes no token ids, so it has no control; drop controls="
            )
        known = [workload.plain.run(request, seed) for request in workload.timed[:4]]
        uninformed = {name: workload.fast(one) for name, one in workload.controls(known).items()}
    runs = _Runners(workload.baselines, {PLAIN: workload.plain, **fast}, more, uninformed, missing)
    names = [*runs.baselines, *runs.ours, *runs.peers, *runs.controls]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two runners are called {', '.join(twice)}; rename recipes")
    return runs


def _run_judged(
    runs: _Runners,
    timings: Mapping[str, Timings],
    workload: Workload,
    seed: int,
    progress: Progress,
) -> RunResults:
    """Return results for the quality measures, of all runners but controls."""
    judged = {name: one.results for name, one in timings.items() if name not in runs.controls}
    if not workload.judged or not workload.qualities:
        return judged
    runners = runs.all
    collected: dict[str, list[Any]] = {name: [] for name in judged}
    for index, request in enumerate(workload.judged):
        for name, results in collected.items():
            results.append(runners[name].run(request, seed + JUDGED_SEED + index))
        progress("judge", index + 1, len(workload.judged))
    return collected
