"""The benchmark: a recipe against `generate()` and its peers, in one process, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mmspec.api import accelerate
from mmspec.bench import pool
from mmspec.bench.efficiency import efficiencies
from mmspec.bench.environment import environment, peak_memory_bytes
from mmspec.bench.players import Assisted, Generate, Inputs, Player, Speculative
from mmspec.bench.progress import Progress, silent
from mmspec.bench.timing import FAILURES, Laps, Ratio, race, timed
from mmspec.bench.workload import Workload, agreement

LENGTHS = range(3, 9)  # draft lengths that stock assisted generation may choose from
LOOKED_UP = 10  # tokens that stock prompt lookup may copy


@dataclass(frozen=True)
class Comparison:
    """What `mmspec bench` reports. Speed-ups are ratios of seconds per new token, medians."""

    recipe: str
    model: str
    drafter: str | None
    speedup_end_to_end: float
    speedup_decode: float  # both sides without the time of the same call stopped after one token
    mean_acceptance_length: float
    acceptance_histogram: list[int]
    tokens_per_target_call: float
    prefill_share: float
    draft_share: float
    verify_share: float
    host_share: float
    engine_efficiency: float
    ideal_speedup: float
    exact: bool  # what the recipe claims
    identical: float | None  # greedy: share of requests answered with the baseline's very tokens
    quality_metric: str
    quality_target: float
    quality_method: float
    peers: dict[str, dict[str, Any]]
    spread: dict[str, list[float]]  # least and most of the repeats
    requests: int
    repeats: int
    max_new_tokens: int
    temperature: float
    seconds_per_token: dict[str, float]
    drafter_saw: str
    peak_memory_bytes: int
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def compare(
    model: Any,
    recipe: str,
    drafter: Any,
    workload: Workload,
    *,
    names: tuple[str, str | None] = ("model", None),
    room: int = 64,
    repeats: int = 5,
    temperature: float = 0.0,
    seed: int = 0,
    peers: bool = True,
    progress: Progress = silent,
    parts: Mapping[str, Any] | None = None,
) -> Comparison:
    """Measure a recipe; `drafter` also serves stock assisted generation."""
    settings: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        settings["temperature"] = temperature
    from mmspec import recipes

    takes = recipes.get(recipe).takes_drafter
    fast = accelerate(model, recipe, drafter=drafter if takes else None, **(parts or {}))
    method = Speculative(fast, settings, seed=seed)
    plain = Speculative(accelerate(model, "plain"), settings, "plain", seed)
    baseline = Generate(model, settings, seed=seed)
    requests = workload.requests
    players: list[Player] = [baseline, method, plain]
    missing: dict[str, str] = {}
    if peers:
        found, missing = stock(
            model, drafter, settings, requests, room, workload.batch, seed, progress
        )
        players += found
    held = race(players, requests, room, repeats, progress, frozenset(p.name for p in players[3:]))
    laps, missing = held.laps, missing | held.failed
    mine, bare = efficiencies([method, plain], requests[:8], room, repeats, progress)
    whole, later = _ratios(laps, "method")
    stats = [answer.stats for answer in laps["method"].answers if answer.stats is not None]
    shares = pool.shares(stats)
    judged = {
        name: _quality(laps[name], laps["generate"], workload) for name in ("generate", "method")
    }
    others = [name for name in laps if name not in ("generate", "method")]
    return Comparison(
        recipe=recipe,
        model=names[0],
        drafter=names[1] if takes else None,
        speedup_end_to_end=whole.median,
        speedup_decode=later.median,
        mean_acceptance_length=pool.mean_acceptance_length(stats),
        acceptance_histogram=pool.histogram(stats),
        tokens_per_target_call=pool.tokens_per_target_call(stats),
        prefill_share=shares["prefill"],
        draft_share=shares["draft"],
        verify_share=shares["verify"],
        host_share=shares["host"],
        engine_efficiency=mine.share,
        ideal_speedup=bare.forwards / mine.forwards,
        exact=fast.recipe.exact,
        identical=None if temperature else _identical(laps["method"], laps["generate"]),
        quality_metric=workload.metric,
        quality_target=judged["generate"],
        quality_method=judged["method"],
        peers={"generate": _peer(laps, "generate")}
        | {name: _peer(laps, name) for name in others}
        | {name: {"skipped": why} for name, why in missing.items()},
        spread={"speedup_end_to_end": whole.spread, "speedup_decode": later.spread},
        requests=len(requests),
        repeats=repeats,
        max_new_tokens=room,
        temperature=temperature,
        seconds_per_token={name: min(lap.per_token()) for name, lap in laps.items()},
        drafter_saw=fast.sees,
        peak_memory_bytes=peak_memory_bytes(fast.session.bound.backbone.device),
        environment=environment(model, workload.batch),
    )


def stock(
    model: Any,
    drafter: Any,
    settings: Mapping[str, Any],
    requests: Sequence[Inputs],
    room: int,
    batch: int,
    seed: int,
    progress: Progress = silent,
) -> tuple[list[Player], dict[str, str]]:
    """The speculation that transformers ships, and why some of it cannot take part.

    Assisted generation takes part twice: with the settings it is shipped with, and tuned.
    """
    players: list[Player] = []
    missing: dict[str, str] = {}
    if batch > 1:
        reason = "transformers speculates at batch 1 only"
        return players, dict.fromkeys(("assisted_as_shipped", "assisted", "prompt_lookup"), reason)
    if drafter is None:
        missing |= dict.fromkeys(("assisted_as_shipped", "assisted"), "no draft model was given")
    else:
        shipped = Generate(
            model, settings, "assisted_as_shipped", {"assistant_model": drafter}, seed
        )
        try:
            shipped.answer(requests[0], room)
            tuned = best_assisted(model, drafter, settings, requests, room, seed, progress)
            players += [shipped, tuned]
        except FAILURES as error:
            why = f"{type(error).__name__}: {error}"
            missing |= dict.fromkeys(("assisted_as_shipped", "assisted"), why)
    lookup = Generate(
        model, settings, "prompt_lookup", {"prompt_lookup_num_tokens": LOOKED_UP}, seed
    )
    try:
        lookup.answer(requests[0], room)
        players.append(lookup)
    except FAILURES as error:
        missing["prompt_lookup"] = f"{type(error).__name__}: {error}"
    return players, missing


def best_assisted(
    model: Any,
    drafter: Any,
    settings: Mapping[str, Any],
    requests: Sequence[Inputs],
    room: int,
    seed: int = 0,
    progress: Progress = silent,
) -> Assisted:
    """Stock assisted generation with the draft length that is quickest on the first requests."""
    players = [Assisted(model, drafter, k, settings, "assisted", seed) for k in LENGTHS]
    times = []
    for index, player in enumerate(players):
        player.answer(requests[0], room)
        spent = [timed(player, inputs, room) for inputs in requests[:4]]
        times.append(sum(s for s, _ in spent) / max(sum(a.count for _, a in spent), 1))
        progress("choose k of assisted generation", index + 1, len(players))
    return players[times.index(min(times))]


def _ratios(laps: Mapping[str, Laps], name: str) -> tuple[Ratio, Ratio]:
    """Speed-ups over `generate()`: end to end, and decoding only."""
    base, mine = laps["generate"], laps[name]
    return (
        Ratio.of(base.per_token(), mine.per_token()),
        Ratio.of(base.per_later_token(), mine.per_later_token()),
    )


def _peer(laps: Mapping[str, Laps], name: str) -> dict[str, Any]:
    whole, later = _ratios(laps, name)
    return {
        "speedup_end_to_end": whole.median,
        "speedup_decode": later.median,
        "tokens_per_target_call": _tokens_per_call(laps[name]),
        "identical": _identical(laps[name], laps["generate"]),
        "spread": whole.spread,
    }


def _tokens_per_call(lap: Laps) -> float:
    """The prefill's token aside; of a batch, the longest row counts."""
    tokens = sum(max(map(len, answer.tokens)) - 1 for answer in lap.answers)
    return tokens / max(sum(answer.calls for answer in lap.answers), 1)


def _identical(lap: Laps, base: Laps) -> float:
    pairs = list(zip(lap.answers, base.answers, strict=True))
    return sum(mine.tokens == other.tokens for mine, other in pairs) / max(len(pairs), 1)


def _quality(lap: Laps, base: Laps, workload: Workload) -> float:
    if workload.quality is None:
        return agreement(lap.answers, base.answers)
    return workload.quality(lap.answers)
