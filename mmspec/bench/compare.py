"""The benchmark: recipes against plain decoding and the library's own ways, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmspec.api import Accelerated
from mmspec.bench.efficiency import efficiencies
from mmspec.bench.environment import environment, peak_memory_bytes
from mmspec.bench.progress import Progress, silent
from mmspec.bench.race import Laps, race
from mmspec.bench.report import Report
from mmspec.bench.row import Found, Row, row
from mmspec.modality import Runner, RunResults, Workload

PLAIN = "plain"
JUDGED_SEED = 1000  # how far the seeds of judged requests lie from those of timed ones


@dataclass(frozen=True)
class Comparison(Report):
    """What `mmspec bench` reports, whatever was decoded."""

    model: str
    modality: str
    rows: list[Row]  # plain decoding, then the recipes
    baselines: list[Row]  # the library's own ways, peers, and what was left out
    controls: list[Row]  # drafters that know nothing
    requests: int
    repeats: int
    judged: int  # requests that the judges looked at
    batch: int
    settings: dict[str, Any]
    peak_memory_bytes: int
    environment: dict[str, Any] = field(default_factory=dict)

    def row(self, name: str) -> Row:
        """The line of a contestant. Raises KeyError for one that there is not."""
        return {one.recipe: one for one in (*self.rows, *self.baselines, *self.controls)}[name]


@dataclass(frozen=True)
class _Field:
    """Who runs."""

    baselines: Mapping[str, Runner]
    ours: Mapping[str, Runner]  # plain decoding first
    peers: Mapping[str, Runner]
    controls: Mapping[str, Runner]
    missing: Mapping[str, str]

    @property
    def everybody(self) -> dict[str, Runner]:
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
    """Measure accelerated models of one target; everybody answers everything in turns.

    `model` and `drafters` (of each recipe) are names for the report. Raises ValueError where there
    is nothing to measure, or two contestants share a name.
    """
    if not recipes or not workload.timed:
        raise ValueError("there is nothing to measure; give a recipe and a request at least")
    runs = _entered(recipes, workload, peers, controls, seed, progress)
    found, missing = _measured(runs, workload, repeats, seed, efficiency, progress)
    device, there = torch.device(workload.device), found.laps
    others = {**runs.baselines, **runs.peers}
    return Comparison(
        model=model,
        modality=next(iter(recipes.values())).modality.name,
        rows=[row(name, found, (drafters or {}).get(name)) for name in runs.ours if name in there],
        baselines=[
            *(row(name, found) for name in others if name in there),
            *(Row(name, skipped=why) for name, why in missing.items()),
        ],
        controls=[row(name, found) for name in runs.controls],
        requests=len(workload.timed),
        repeats=repeats,
        judged=len(workload.judged or workload.timed),
        batch=workload.batch,
        settings=dict(workload.settings),
        peak_memory_bytes=peak_memory_bytes(device),
        environment={**environment(device, workload.batch), **workload.environment},
    )


def _measured(
    runs: _Field,
    workload: Workload,
    repeats: int,
    seed: int,
    efficiency: bool,
    progress: Progress,
) -> tuple[Found, dict[str, str]]:
    """Race, judges and replays; and why some could not take part.

    Plain decoding may fail where a baseline can stand in for it.
    """
    may_fail = {*runs.baselines, *runs.peers, *([PLAIN] if runs.baselines else [])}
    device = torch.device(workload.device)
    held = race(
        runs.everybody,
        workload.timed,
        repeats,
        seed=seed,
        device=device,
        may_fail=may_fail,
        progress=progress,
    )
    missing = {**runs.missing, **held.failed}
    base = next((name for name in runs.baselines if name in held.laps), None)
    reference = PLAIN if PLAIN in held.laps else base
    if reference is None:
        raise ValueError(f"neither plain decoding nor a baseline could run: {missing}")
    shown = _shown(runs, held.laps, workload, seed, progress)
    found = Found(workload, held.laps, shown, reference, base)
    if not (efficiency and workload.replayed):
        return found, missing
    ours = {name: one for name, one in runs.ours.items() if name in held.laps}
    asked = workload.timed[: workload.replayed]
    shares = efficiencies(ours, asked, min(repeats, 3), seed, device, progress)
    return replace(found, efficiencies=shares), missing


def _entered(
    recipes: Mapping[str, Accelerated],
    workload: Workload,
    peers: bool,
    controls: bool,
    seed: int,
    progress: Progress,
) -> _Field:
    """Everybody who is to run, plain decoding beside the recipes."""
    fast = {name: workload.fast(one) for name, one in recipes.items()}
    more, missing = dict[str, Runner](), dict(workload.missing)
    if peers and workload.peers is not None:
        found, why = workload.peers(fast, seed, progress)
        more, missing = dict(found), {**missing, **why}
    blind: dict[str, Runner] = {}
    if controls:
        if workload.controls is None:
            raise ValueError("this modality decodes no ids, so it has no control; drop controls=")
        known = [workload.plain.run(asked, seed) for asked in workload.timed[:4]]
        blind = {name: workload.fast(one) for name, one in workload.controls(known).items()}
    runs = _Field(workload.baselines, {PLAIN: workload.plain, **fast}, more, blind, missing)
    names = [*runs.baselines, *runs.ours, *runs.peers, *runs.controls]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two contestants are called {', '.join(twice)}; name recipes otherwise")
    return runs


def _shown(
    runs: _Field, laps: Mapping[str, Laps], workload: Workload, seed: int, progress: Progress
) -> RunResults:
    """What the judges look at, of everybody who is still there; controls are not judged."""
    judged = {name: lap.answers for name, lap in laps.items() if name not in runs.controls}
    if not workload.judged or not workload.qualities:
        return judged
    everybody = runs.everybody
    shown: dict[str, list[Any]] = {name: [] for name in judged}
    for index, asked in enumerate(workload.judged):
        for name, answers in shown.items():
            answers.append(everybody[name].run(asked, seed + JUDGED_SEED + index))
        progress("answer for the judges", index + 1, len(workload.judged))
    return shown
