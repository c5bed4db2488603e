"""Compare visual token compressors on one pair of target and draft model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from mmspec.accelerated import Accelerated, RequestLoop
from mmspec.bench.compare import compare
from mmspec.bench.reporting import PointTable, Progress, silent
from mmspec.bench.row import Row
from mmspec.compressors import COMPRESSORS, describe, parse_compressor
from mmspec.compressors.contract import OF_ROBOTS, Compressed, Compressor, Features, Shape
from mmspec.decode import GuardedDrafter
from mmspec.draft import Draft, Round
from mmspec.modality import Call, Workload
from mmspec.stats import Stats

WHOLE = "none"  # without a compressor


@dataclass(frozen=True)
class CompressionTrace:
    """Which cells of one image or clip have a feature left."""

    shape: Shape  # frames, rows, columns
    sizes: tuple[int, ...]  # per cell, number of originals merged into its features; 0 = dropped
    kept: int  # number of features left; several may share a cell


@dataclass(frozen=True)
class TracingCompressor(Compressor):
    """A compressor that records its inputs and outputs."""

    inner: Compressor
    traces: list[CompressionTrace] = field(default_factory=list)

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    def build(self, width: int, like: Tensor) -> Compressor:
        return replace(self, inner=self.inner.build(width, like))

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        made = self.inner.compress(features, signals)
        where = torch.searchsorted(features.positions, made.positions)
        sizes = torch.zeros_like(features.positions).index_add(0, where, made.sizes)
        self.traces.append(CompressionTrace(features.shape, tuple(sizes.tolist()), len(made.sizes)))
        return made


@dataclass(frozen=True)
class CompressorPoint:
    """One compressor: the share of visual tokens kept, and its benchmark row."""

    compressor: str
    kept: float  # share of visual tokens
    prefill_ms: float  # of the draft model: encoder, compressor and prompt
    kv_bytes: int | None  # of the prompt in the draft model's cache; None = unknown
    row: Row
    first: CompressionTrace | None = None  # the first image or clip of the first request

    def flat(self) -> dict[str, Any]:
        """Return one table row."""
        one = self.row
        minimum, maximum = one.spread.get("speedup_end_to_end", (None, None))
        return {
            "compressor": self.compressor,
            "kept": self.kept,
            "drafter_prefill_ms": self.prefill_ms,
            "drafter_kv_bytes": self.kv_bytes,
            "mean_acceptance_length": one.mean_acceptance_length,
            "fewer_calls": one.fewer_calls,
            "speedup_end_to_end": one.speedup_end_to_end,
            "speedup_least": minimum,
            "speedup_most": maximum,
            "identical": one.identical,
        }


@dataclass(frozen=True)
class Catalogue(PointTable):
    """The report of `mmspec bench compressors`."""

    model: str
    recipe: str
    points: list[CompressorPoint]
    left_out: dict[str, str]  # name -> reason
    settings: dict[str, Any]
    requests: int
    repeats: int
    environment: dict[str, Any] = field(default_factory=dict)


def default_compressors() -> list[str]:
    """Names of compressors that need neither trained weights nor robot observations."""
    entries = [describe(name) for name in COMPRESSORS]
    return [one["name"] for one in entries if not (one["trained"] or OF_ROBOTS & {*one["needs"]})]


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
    """Compare compressors, given by name and parameters, with the uncompressed draft model.

    `accelerated(recipe, **parts)` binds them to one pair. Compressors that do not fit the pair are
    reported with the reason; unknown names raise ValueError.
    """
    tracing = {
        text: TracingCompressor(parse_compressor(text))
        for text in compressors or default_compressors()
    }
    ways, left_out = {WHOLE: accelerated(recipe)}, dict[str, str]()
    for text, one in tracing.items():
        try:
            ways[text] = accelerated(recipe, compressor=one)
        except ValueError as error:
            left_out[text] = str(error)
    alone = replace(workload, peers=None)
    options: dict[str, Any] = {"repeats": repeats, "seed": seed, "progress": progress}
    found = compare(model, ways, alone, efficiency=False, **options)
    prefill = _prefill(ways, workload, repeats, seed)
    points = []
    for row in found.rows:
        if row.recipe not in ways:
            continue
        traces = tracing[row.recipe].traces if row.recipe in tracing else []
        total = sum(len(one.sizes) for one in traces)
        share = sum(one.kept for one in traces) / total if total else 1.0
        first = traces[0] if traces else None
        size = drafter_kv_bytes(ways[row.recipe], workload, seed)
        prefill_ms = 1e3 * prefill[row.recipe]
        points.append(CompressorPoint(row.recipe, share, prefill_ms, size, row, first))
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
    """Median seconds of the draft models' prefills, measured in turns."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for request in list(workload.timed) * repeats:
        for name, fast in ways.items():
            rounds: list[Round] = []
            one_token = {**request, "max_new_tokens": 1}
            fast.generate(**one_token, seed=seed, on_round=rounds.append)
            spent[name].append(rounds[0].seconds.get("draft", 0.0))
    return {name: median(times) for name, times in spent.items()}


def drafter_kv_bytes(fast: Accelerated, workload: Workload, seed: int) -> int | None:
    """Mean bytes of keys and values of a prompt in the draft model's cache, over requests."""
    sizes: list[int] = []
    for request in workload.timed:
        run = _KvSizeRun(fast.model)
        fast.session.run(fast.calls[0], (), {**request, "max_new_tokens": 1, "seed": seed}, run)
        sizes += run.kv_bytes
    return round(mean(sizes)) if sizes else None


class _KvSizeRun:
    """A run that first reads the size of the drafter's cache after the prompt."""

    is_watched = False

    def __init__(self, model: Any) -> None:
        self.run, self.kv_bytes = RequestLoop(model, ()), list[int]()

    def __call__(self, call: Call) -> Iterator[Round]:
        drafter = GuardedDrafter(call.parts.drafter)
        drafter.begin(call.parts.target.prefill(call.request))
        size = None if drafter.drafter is None else drafter.drafter.cache_bytes(drafter.state)
        self.kv_bytes += [] if size is None else [size]
        return self.run(call)

    def stats(self) -> Stats:
        return self.run.stats()

    def report(self, stats: Stats) -> None:
        self.run.report(stats)

    def show(self, round_: Round, draft: Draft, states: Any) -> None:
        self.run.show(round_, draft, states)
