"""One line of a result, with the same columns whatever is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from mmspec.bench import aggregate
from mmspec.bench.efficiency import Efficiency
from mmspec.bench.race import Laps, Ratio
from mmspec.bench.report import Report
from mmspec.modality import Quality, RunResult, RunResults, Workload


@dataclass(frozen=True)
class Row(Report):
    """One contestant. None = it means nothing here, or was not measured.

    Speed-ups are ratios of seconds per token (code, picture), medians over repeats; `spread` has
    the least and the most of each. Errors are standard errors.
    """

    recipe: str
    exact: bool | None = None  # what is claimed of the output's distribution
    drafter: str | None = None
    calls: float | None = None  # of the target per request, prefill aside
    fewer_calls: float | None = None  # those of plain decoding over these
    fewer_calls_error: float | None = None  # over requests
    speedup_end_to_end: float | None = None  # over the first baseline
    speedup_decode: float | None = None  # the same without the time of a one-token call
    speedup_over_plain: float | None = None  # end to end, over plain decoding by our own loop
    spread: dict[str, list[float]] = field(default_factory=dict)
    mean_acceptance_length: float | None = None
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_acceptance_rate: float | None = None
    tokens_per_target_call: float | None = None
    prefill_share: float | None = None
    draft_share: float | None = None
    verify_share: float | None = None
    host_share: float | None = None
    engine_efficiency: float | None = None  # forwards alone over wall time
    ideal_speedup: float | None = None  # forwards of plain decoding over forwards of this
    identical: float | None = None  # greedy: share of requests answered as the baseline did
    qualities: dict[str, dict[str, float | None]] = field(default_factory=dict)
    distance: float | None = None  # over-accepted mass per token; None = exact, or not measured
    seconds_per_request: float | None = None
    unverified_share: float | None = None  # of the tokens: kept by a gate, the target not asked
    fallback: str | None = None  # why the drafter was retired
    drafter_saw: str | None = None
    network_rows: float | None = None  # per request
    extras: dict[str, Any] = field(default_factory=dict)  # what only one modality has
    skipped: str | None = None  # why it took no part


@dataclass(frozen=True)
class Found:
    """Everything that was measured, for rows to be made of."""

    workload: Workload
    laps: Mapping[str, Laps]
    shown: RunResults  # for the judges
    reference: str  # plain decoding, or who stands in for it
    base: str | None  # the first baseline, where it took part
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)
    judged: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def judge(self, name: str, quality: Quality) -> list[tuple[float, float]]:
        """What a judge makes of each answer of a contestant, with weights; asked once."""
        key = (name, quality.name)
        if key not in self.judged:
            self.judged[key] = list(quality.judge(self.shown[name], self.shown))
        return self.judged[key]


def row(name: str, found: Found, drafter: str | None = None) -> Row:
    """The line of one contestant."""
    lap = found.laps[name]
    stats = [one.stats for one in lap.answers if one.stats is not None]
    first = lap.answers[0]
    return Row(
        recipe=name,
        exact=all(one.exact for one in lap.answers),
        drafter=drafter,
        calls=fmean(one.calls for one in lap.answers),
        identical=_identical(found, name),
        qualities=_qualities(found, name),
        seconds_per_request=min(lap.whole) / len(lap.answers),
        network_rows=None
        if first.network_rows is None
        else fmean(one.network_rows or 0.0 for one in lap.answers),
        extras={} if found.workload.extras is None else _extras(found, name),
        **_calls(lap.answers, found.laps[found.reference].answers),
        **_speedups(found, name),
        **_forwards(found, name),
        **(_counted(stats, [*lap.answers, *found.shown.get(name, ())]) if stats else {}),
    )


def _extras(found: Found, name: str) -> dict[str, Any]:
    assert found.workload.extras is not None
    answers = {other: lap.answers for other, lap in found.laps.items()}
    return dict(found.workload.extras(answers[name], answers))


def _calls(mine: Sequence[RunResult], plain: Sequence[RunResult]) -> dict[str, Any]:
    """How many times fewer; the error of a ratio of sums, by its linear part."""
    calls, base = [one.calls for one in mine], [one.calls for one in plain]
    if not sum(calls):
        return {"fewer_calls": None, "fewer_calls_error": None}
    ratio = sum(base) / sum(calls)
    left = [b - ratio * c for b, c in zip(base, calls, strict=True)]
    return {"fewer_calls": ratio, "fewer_calls_error": error(left) / fmean(calls)}


def _speedups(found: Found, name: str) -> dict[str, Any]:
    mine, plain = found.laps[name], found.laps[found.reference]
    over = {"speedup_over_plain": Ratio.of(plain.each(), mine.each())}
    if found.base is not None:
        base = found.laps[found.base]
        over["speedup_end_to_end"] = Ratio.of(base.each(), mine.each())
        over["speedup_decode"] = Ratio.of(base.each_later(), mine.each_later())
    known = {key: ratio for key, ratio in over.items() if ratio is not None}
    medians = {key: ratio.median for key, ratio in known.items()}
    return {**medians, "spread": {key: ratio.spread for key, ratio in known.items()}}


def _forwards(found: Found, name: str) -> dict[str, Any]:
    mine, plain = (found.efficiencies.get(one) for one in (name, found.reference))
    if mine is None:
        return {}
    ideal = {} if plain is None else {"ideal_speedup": plain.forwards / mine.forwards}
    return {"engine_efficiency": mine.share, **ideal}


def _counted(stats: Sequence[Any], everything: Sequence[RunResult]) -> dict[str, Any]:
    """What the statistics of the timed requests say; loss and failure also of the judged ones."""
    drafted = sum(one.num_draft_tokens for one in stats)
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    all_stats = [one.stats for one in everything if one.stats is not None]
    unverified = sum(one.unverified_tokens for one in stats)
    shares = aggregate.shares(stats)
    return {
        "mean_acceptance_length": aggregate.mean_acceptance_length(stats),
        "acceptance_histogram": aggregate.histogram(stats),
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "tokens_per_target_call": aggregate.tokens_per_target_call(stats),
        **{f"{part}_share": share for part, share in shares.items()},
        "distance": aggregate.over_accepted_mass(all_stats),
        "unverified_share": unverified / max(sum(one.num_new_tokens for one in stats), 1),
        "fallback": next((one.fallback for one in all_stats if one.fallback), None),
        "drafter_saw": stats[0].drafter_saw,
    }


def _identical(found: Found, name: str) -> float | None:
    if not found.workload.is_greedy:
        return None
    mine, base = (found.laps[one].answers for one in (name, found.base or found.reference))
    return fmean(float(a.values == b.values) for a, b in zip(mine, base, strict=True))


def _qualities(found: Found, name: str) -> dict[str, dict[str, float | None]]:
    """Means, and what they are above those of plain decoding on the same items."""
    if name not in found.shown:
        return {}
    made: dict[str, dict[str, float | None]] = {}
    for quality in found.workload.qualities:
        mine, plain = (found.judge(one, quality) for one in (name, found.reference))
        if not mine:
            continue
        value, uncertain = _mean(mine)
        gap: tuple[float, float] | tuple[None, None] = (None, None)
        if len(mine) == len(plain):
            pairs = zip(mine, plain, strict=True)
            gap = _mean([(one - other, weight) for (one, weight), (other, _) in pairs])
        made[quality.name] = dict(
            zip(("value", "error", "gap", "gap_error"), (value, uncertain, *gap), strict=True)
        )
    return made


def _mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The weighted mean of values, and its standard error by the linear part of that ratio."""
    total = sum(weight for _, weight in values) or 1.0
    mean = sum(value * weight for value, weight in values) / total
    parts = [(value - mean) * weight * len(values) / total for value, weight in values]
    return mean, error(parts)


def error(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
