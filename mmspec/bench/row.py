"""One table row of a benchmark result, with the same columns for all modalities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, stdev
from typing import Any

from mmspec.bench.efficiency import Efficiency
from mmspec.bench.reporting import Report
from mmspec.bench.timing import Ratio, Timings
from mmspec.modality import Quality, RunResult, RunResults, Workload
from mmspec.stats import Stats

BASELINE_TITLES = {  # of baselines, in tables for readers; data keep the names
    "generate": "transformers: generate()",
    "generate, compiled": "transformers: generate(), compiled",
    "assisted_as_shipped": "transformers: assisted generation, as shipped",
    "assisted": "transformers: assisted generation, tuned",
    "prompt_lookup": "transformers: prompt lookup",
    "pipeline": "diffusers: pipeline",
    "hold_last": "hold-last, baseline",
    "hold_last_tolerance": "hold-last-tolerance, baseline",
}


@dataclass(frozen=True)
class Row(Report):
    """Results of one runner. None = not applicable, or not measured.

    Speed-ups are ratios of seconds per token (code, image), medians over repeats; `spread` holds
    minimum and maximum of each. Errors are standard errors.
    """

    recipe: str
    exact: bool | None = None  # whether the recipe claims the target's distribution
    drafter: str | None = None
    calls: float | None = None  # target calls per request, without the prefill
    prefill_steps: float | None = None  # per request: rows whose draft the prefill verified
    fewer_calls: float | None = None  # calls of plain decoding over calls
    fewer_calls_error: float | None = None  # over requests
    speedup_end_to_end: float | None = None  # over the first baseline
    speedup_decode: float | None = None  # the same less the time of a one-token call
    speedup_over_plain: float | None = None  # end to end, over plain decoding in this loop
    spread: dict[str, list[float]] = field(default_factory=dict)
    mean_acceptance_length: float | None = None
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_acceptance_rate: float | None = None
    tokens_per_target_call: float | None = None
    prefill_share: float | None = None
    draft_share: float | None = None
    verify_share: float | None = None
    host_share: float | None = None
    engine_efficiency: float | None = None  # time of the forwards alone over wall time
    ideal_speedup: float | None = None  # forwards of plain decoding over forwards of this
    identical: float | None = None  # greedy: share of requests with the baseline's output
    qualities: dict[str, dict[str, float | None]] = field(default_factory=dict)
    distance: float | None = None  # over-accepted mass per token; None = exact, or not measured
    seconds_per_request: float | None = None
    unverified_share: float | None = None  # of tokens: accepted by a gate without the target
    fallback: str | None = None  # why the drafter was retired
    drafter_saw: str | None = None
    network_rows: float | None = None  # per request
    extras: dict[str, Any] = field(default_factory=dict)  # columns of one modality
    skipped: str | None = None  # why it was not run


@dataclass(frozen=True)
class Measurements:
    """All measurements that rows are made from."""

    workload: Workload
    timings: Mapping[str, Timings]
    judged_results: RunResults  # on the requests for quality measures
    reference: str  # plain decoding, or the baseline that replaces it
    base: str | None  # the first baseline, where it ran
    efficiencies: Mapping[str, Efficiency] = field(default_factory=dict)
    scores: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=dict)

    def score(self, name: str, quality: Quality) -> list[tuple[float, float]]:
        """Return (score, weight) of each result of a runner; computed once."""
        key = (name, quality.name)
        if key not in self.scores:
            results = self.judged_results
            self.scores[key] = list(quality.judge(results[name], results))
        return self.scores[key]


def make_row(name: str, found: Measurements, drafter: str | None = None) -> Row:
    """Make the row of one runner."""
    timings = found.timings[name]
    results = timings.results
    stats = [one.stats for one in results if one.stats is not None]
    return Row(
        recipe=name,
        exact=all(one.exact for one in results),
        drafter=drafter,
        calls=fmean(one.calls for one in results),
        identical=_identical(found, name),
        qualities=measure_qualities(found, name),
        seconds_per_request=min(timings.run_seconds) / len(results),
        network_rows=None
        if results[0].network_rows is None
        else fmean(one.network_rows or 0.0 for one in results),
        extras={} if found.workload.extras is None else _extras(found, name),
        **_calls(results, found.timings[found.reference].results),
        **_speedups(found, name),
        **_forwards(found, name),
        **(_speculation(stats, [*results, *found.judged_results.get(name, ())]) if stats else {}),
    )


def _extras(found: Measurements, name: str) -> dict[str, Any]:
    assert found.workload.extras is not None
    results = {other: timings.results for other, timings in found.timings.items()}
    return dict(found.workload.extras(results[name], results))


def _calls(own: Sequence[RunResult], plain: Sequence[RunResult]) -> dict[str, Any]:
    """Return the ratio of calls and its standard error, by linearising the ratio of sums."""
    calls, base = [one.calls for one in own], [one.calls for one in plain]
    if not sum(calls):
        return {"fewer_calls": None, "fewer_calls_error": None}
    ratio = sum(base) / sum(calls)
    residuals = [b - ratio * c for b, c in zip(base, calls, strict=True)]
    return {"fewer_calls": ratio, "fewer_calls_error": error(residuals) / fmean(calls)}


def _speedups(found: Measurements, name: str) -> dict[str, Any]:
    own, plain = found.timings[name], found.timings[found.reference]
    over = {"speedup_over_plain": Ratio.of(plain.seconds_per_token(), own.seconds_per_token())}
    if found.base is not None:
        base = found.timings[found.base]
        over["speedup_end_to_end"] = Ratio.of(base.seconds_per_token(), own.seconds_per_token())
        over["speedup_decode"] = Ratio.of(
            base.decode_seconds_per_token(), own.decode_seconds_per_token()
        )
    known = {key: ratio for key, ratio in over.items() if ratio is not None}
    medians = {key: ratio.median for key, ratio in known.items()}
    return {**medians, "spread": {key: ratio.spread for key, ratio in known.items()}}


def _forwards(found: Measurements, name: str) -> dict[str, Any]:
    own, plain = (found.efficiencies.get(one) for one in (name, found.reference))
    if own is None:
        return {}
    if plain is None or not own.forwards:
        return {"engine_efficiency": own.share}
    return {
        "engine_efficiency": own.share,
        "ideal_speedup": plain.forwards / own.forwards,
    }


def _speculation(stats: Sequence[Stats], results: Sequence[RunResult]) -> dict[str, Any]:
    """Columns from the statistics of timed requests; distance and fallback of all `results`."""
    drafted = sum(one.num_draft_tokens for one in stats)
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    all_stats = [one.stats for one in results if one.stats is not None]
    unverified = sum(one.unverified_tokens for one in stats)
    return {
        "mean_acceptance_length": mean_acceptance_length(stats),
        "acceptance_histogram": acceptance_histogram(stats),
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "tokens_per_target_call": tokens_per_target_call(stats),
        "prefill_steps": fmean(one.prefill_steps for one in stats),
        **{f"{part}_share": share for part, share in time_shares(stats).items()},
        "distance": over_accepted_mass(all_stats),
        "unverified_share": unverified / max(sum(one.num_new_tokens for one in stats), 1),
        "fallback": next((one.fallback for one in all_stats if one.fallback), None),
        "drafter_saw": stats[0].drafter_saw,
    }


def mean_acceptance_length(stats: Sequence[Stats]) -> float:
    """Mean over the steps of all requests, with the token that every step adds."""
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    return 1 + accepted / max(sum(one.num_spec_steps for one in stats), 1)


def acceptance_histogram(stats: Sequence[Stats]) -> list[int]:
    """Entry j: number of steps that accepted exactly j draft tokens."""
    columns = zip_longest(*(one.acceptance_histogram for one in stats), fillvalue=0)
    return [sum(column) for column in columns]


def tokens_per_target_call(stats: Sequence[Stats]) -> float:
    """Mean over the target calls of all requests."""
    calls = [one.num_spec_steps + one.speculation_off_steps for one in stats]
    tokens = sum(one.tokens_per_target_call * n for one, n in zip(stats, calls, strict=True))
    return tokens / max(sum(calls), 1)


def time_shares(stats: Sequence[Stats]) -> dict[str, float]:
    """Shares of prefill, draft, verify and host in the total time; they sum to 1."""
    total = sum(one.total_seconds for one in stats) or 1.0
    parts = ("prefill", "draft", "verify", "host")
    return {part: sum(getattr(one, f"{part}_seconds") for one in stats) / total for part in parts}


def over_accepted_mass(stats: Sequence[Stats]) -> float | None:
    """Mean per token; None where it was not measured."""
    measured = [one for one in stats if one.over_accepted_mass is not None]
    tokens = sum(one.num_new_tokens for one in measured)
    mass = sum((one.over_accepted_mass or 0.0) * one.num_new_tokens for one in measured)
    return mass / max(tokens, 1) if measured else None


def _identical(found: Measurements, name: str) -> float | None:
    if not found.workload.is_greedy:
        return None
    own, base = (found.timings[one].results for one in (name, found.base or found.reference))
    return fmean(float(a.values == b.values) for a, b in zip(own, base, strict=True))


def measure_qualities(found: Measurements, name: str) -> dict[str, dict[str, float | None]]:
    """Means of all quality measures, and their gaps to plain decoding on the same items."""
    if name not in found.judged_results:
        return {}
    columns: dict[str, dict[str, float | None]] = {}
    for quality in found.workload.qualities:
        own, plain = (found.score(one, quality) for one in (name, found.reference))
        if not own:
            continue
        value, value_error = _mean(own)
        gap: tuple[float, float] | tuple[None, None] = (None, None)
        if len(own) == len(plain):
            pairs = zip(own, plain, strict=True)
            gap = _mean([(one - other, weight) for (one, weight), (other, _) in pairs])
        columns[quality.name] = dict(
            zip(("value", "error", "gap", "gap_error"), (value, value_error, *gap), strict=True)
        )
    return columns


def _mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the weighted mean of (value, weight) and its standard error, linearised."""
    total = sum(weight for _, weight in values) or 1.0
    mean = sum(value * weight for value, weight in values) / total
    parts = [(value - mean) * weight * len(values) / total for value, weight in values]
    return mean, error(parts)


def error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
