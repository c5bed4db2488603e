"""The catalogue of compressors on one pair: how much is kept, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from mmspec.api import Accelerated, Run
from mmspec.bench.compare import compare
from mmspec.bench.progress import Progress, silent
from mmspec.bench.report import PointTable
from mmspec.bench.row import Row
from mmspec.compressors import COMPRESSORS, about, named
from mmspec.compressors.contract import OF_ROBOTS, Compressed, Compressor, Features, Shape
from mmspec.decode import GuardedDrafter
from mmspec.draft import Round
from mmspec.modality import Call, Workload
from mmspec.stats import Stats

WHOLE = "none"  # without a compressor


@dataclass(frozen=True)
class Thinned:
    """What became of one picture or clip: which of its cells have a feature left."""

    shape: Shape  # frames, rows, columns
    sizes: tuple[int, ...]  # per cell, how many originals its features stand for; 0 = none left
    kept: int  # features left; merged ones may share a cell


@dataclass(frozen=True)
class Counted(Compressor):
    """A compressor that is watched: what went in, and what came out."""

    inner: Compressor
    seen: list[Thinned] = field(default_factory=list)

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    def fitted(self, width: int, like: Tensor) -> Compressor:
        return replace(self, inner=self.inner.fitted(width, like))

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        made = self.inner.compress(features, signals)
        where = torch.searchsorted(features.positions, made.positions)
        sizes = torch.zeros_like(features.positions).index_add(0, where, made.sizes)
        self.seen.append(Thinned(features.shape, tuple(sizes.tolist()), len(made.sizes)))
        return made


@dataclass(frozen=True)
class CompressorPoint:
    """One compressor: the share of visual tokens that it left, and the line of its race."""

    compressor: str
    kept: float  # share of visual tokens
    prefill_ms: float  # of the draft model: its encoder, the compressor, and the prompt
    kv_bytes: int | None  # keys and values of the prompt that it keeps; None = it does not say
    row: Row
    first: Thinned | None = None  # the first picture or clip of the first request

    def flat(self) -> dict[str, Any]:
        """One line of a table."""
        one = self.row
        least, most = one.spread.get("speedup_end_to_end", (None, None))
        return {
            "compressor": self.compressor,
            "kept": self.kept,
            "drafter_prefill_ms": self.prefill_ms,
            "drafter_kv_bytes": self.kv_bytes,
            "mean_acceptance_length": one.mean_acceptance_length,
            "fewer_calls": one.fewer_calls,
            "speedup_end_to_end": one.speedup_end_to_end,
            "speedup_least": least,
            "speedup_most": most,
            "identical": one.identical,
        }


@dataclass(frozen=True)
class Catalogue(PointTable):
    """What `mmspec bench compressors` reports."""

    model: str
    recipe: str
    points: list[CompressorPoint]
    left_out: dict[str, str]  # why
    settings: dict[str, Any]
    requests: int
    repeats: int
    environment: dict[str, Any] = field(default_factory=dict)


def usual() -> list[str]:
    """All that need neither weights nor a robot."""
    listed = [about(name) for name in COMPRESSORS]
    return [one["name"] for one in listed if not (one["trained"] or OF_ROBOTS & {*one["needs"]})]


def catalogue(
    accelerated: Callable[..., Accelerated],
    workload: Workload,
    *,
    recipe: str,
    compressors: Sequence[str] | None = None,
    model: str = "model",
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = silent,
) -> Catalogue:
    """Race compressors, by name and parameters, with the draft model that sees everything.

    `accelerated(recipe, **parts)` binds them to one pair. What does not go with the pair is left
    out, and why is said; names that there are not raise ValueError.
    """
    watched = {text: Counted(named(text)) for text in compressors or usual()}
    ways, left_out = {WHOLE: accelerated(recipe)}, dict[str, str]()
    for text, one in watched.items():
        try:
            ways[text] = accelerated(recipe, compressor=one)
        except ValueError as error:
            left_out[text] = str(error)
    alone = replace(workload, peers=None)
    how: dict[str, Any] = {"repeats": repeats, "seed": seed, "progress": progress}
    found = compare(model, ways, alone, efficiency=False, **how)
    begun = _prefill(ways, workload, repeats, seed)
    points = []
    for row in found.rows:
        if row.recipe not in ways:
            continue
        seen = watched[row.recipe].seen if row.recipe in watched else []
        given = sum(len(one.sizes) for one in seen)
        kept = sum(one.kept for one in seen) / given if given else 1.0
        first = seen[0] if seen else None
        held = drafter_kv_bytes(ways[row.recipe], workload, seed)
        points.append(CompressorPoint(row.recipe, kept, 1e3 * begun[row.recipe], held, row, first))
    return Catalogue(
        model=model,
        recipe=recipe,
        points=sorted(points, key=lambda point: -point.kept),
        left_out=left_out,
        settings=found.settings,
        requests=found.requests,
        repeats=repeats,
        environment=found.environment,
    )


def _prefill(
    ways: Mapping[str, Accelerated], workload: Workload, repeats: int, seed: int
) -> dict[str, float]:
    """Median seconds until each way's draft model has read a prompt; the ways take turns."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for request in list(workload.timed) * repeats:
        for name, fast in ways.items():
            rounds: list[Round] = []
            asked = {**request, "max_new_tokens": 1}
            fast.generate(**asked, seed=seed, on_round=rounds.append)
            spent[name].append(rounds[0].seconds.get("draft", 0.0))
    return {name: median(times) for name, times in spent.items()}


def drafter_kv_bytes(fast: Accelerated, workload: Workload, seed: int) -> int | None:
    """Mean bytes of keys and values that the draft model keeps of a prompt, over requests."""
    weighed = []
    for request in workload.timed:
        run = _WeighedRun(fast.model)
        fast.session.run(
            fast.session.calls[0], (), {**request, "max_new_tokens": 1, "seed": seed}, run
        )
        weighed += run.held
    return round(mean(weighed)) if weighed else None


class _WeighedRun:
    """A run that asks first what the drafter keeps of the prompt."""

    is_watched = False

    def __init__(self, model: Any) -> None:
        self.run, self.held = Run(model, ()), list[int]()

    def __call__(self, call: Call) -> Iterator[Round]:
        drafter = GuardedDrafter(call.parts.drafter)
        drafter.begin(call.parts.target.prefill(call.request))
        held = None if drafter.drafter is None else drafter.drafter.holds(drafter.state)
        self.held += [] if held is None else [held]
        return self.run(call)

    def stats(self) -> Stats:
        return self.run.stats()

    def report(self, stats: Stats) -> None:
        self.run.report(stats)
