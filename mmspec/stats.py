"""Statistics of a run: drafted tokens, accepted tokens, cost."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mmspec.draft import Round

log = logging.getLogger("mmspec")


@dataclass(frozen=True)
class Stats:
    """Acceptance and cost of one request; counts are summed over batch rows.

    Names and definitions follow the per-request metrics of vLLM: the mean acceptance length
    includes the target's own token (plain decoding = 1). A *step* is one row of one target call
    that had a draft, the prefill's among them where it read one. `over_accepted_mass` estimates,
    without bias, the probability mass that a relaxed rule accepts in excess of the target's
    (`mmspec.verifiers.distances`); times the number of tokens it bounds the distance of the whole
    output from the target's, where corrections are sampled from norm((p - q)+).
    """

    recipe: str
    exact: bool
    drafter_saw: str
    num_new_tokens: int
    num_spec_steps: int
    num_draft_tokens: int  # proposed nodes; in a tree, all of them
    num_accepted_draft_tokens: int
    mean_acceptance_length: float  # 1 + accepted / steps
    draft_acceptance_rate: float  # accepted / proposed
    acceptance_histogram: list[int]  # entry j: steps that accepted exactly j draft tokens
    acceptance_histogram_by_draft_length: dict[int, list[int]]
    per_position_acceptance: list[float]  # entry i: share of steps that accepted more than i
    conditional_acceptance: list[float]  # the same, given that i were accepted
    per_step_accepted: list[int]
    per_step_drafted: list[int]
    target_calls: int  # forwards of the target, prefill aside
    tokens_per_target_call: float  # per row and call, with a prefill only where it had a draft
    speculation_off_steps: int  # calls without any draft
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    host_seconds: float
    total_seconds: float
    fallback: str | None = None  # why the drafter was disabled, if it was
    network_rows: int = 0  # of a denoising chain: rows of the network, branches of guidance counted
    over_accepted_mass: float | None = None  # mean per token; None = exact, or not measured
    unverified_tokens: int = 0  # accepted by a gate, without the target
    forecast_errors: list[tuple[int, float]] = field(default_factory=list)  # (step, error) checked
    prefill_steps: int = 0  # of the steps, those of the prefill, which is none of `target_calls`
    skipped_work: float | None = None  # of forecasts: share of the network's operations
    first_audio_ms: float | None = None  # of speech: time to the first audio
    first_audio_round: int | None = None  # the round that completed it, from 1
    jitter_ms: float | None = None  # standard deviation of the time between pieces of audio
    audio_seconds: float | None = None  # of all rows
    codec_seconds: float | None = None  # time of decoding codes into audio
    compiled_forwards: int | None = None  # of target and draft model; None = not asked for
    compiled_graphs: int | None = None  # compiled for this request: 0 after the first ones
    not_compiled: str | None = None  # what ran eager, and why
    compile: dict[str, str] | None = None  # the same by part, as `PARTS`

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


PARTS = ("images", "prompt", "target", "drafter", "verifier")
IMAGES, PROMPT, TARGET, DRAFTER, VERIFIER = PARTS

_UNCOMPILED = {
    IMAGES: "no image was encoded by a function of its own",
    PROMPT: "it was read by the model's own forward",
    VERIFIER: "it verified no draft of the shape that is compiled",
}


@dataclass
class CompileLog:
    """What was compiled (`accelerate(compile=True)`); shared by the parts of a round."""

    forwards: int = 0  # of this request, run as a compiled graph
    graphs: int = 0  # compiled for this request
    reasons: dict[str, dict[str, None]] = field(default_factory=dict)  # by part: why it runs eager
    runs: Counter[str] = field(default_factory=Counter)  # graphs run for this request, by part

    def start(self) -> None:
        """Count anew, for another request."""
        self.forwards = self.graphs = 0
        self.runs.clear()

    def count(self, part: str, forwards: int = 1) -> None:
        """Count a graph that was run, in place of so many forwards."""
        self.runs[part] += 1
        self.forwards += forwards

    def refuse(self, name: str, reason: str, part: str) -> None:
        """Note why something runs eager, with one warning."""
        line = f"{name} runs eager: {reason}"
        known = self.reasons.setdefault(part, {})
        if line not in known:
            known[line] = None
            log.warning("compile=True: %s", line)

    def describe(self, part: str) -> str:
        """Whether a part ran compiled in this request, and why not."""
        reasons = "; ".join(self.reasons.get(part, ()))
        if self.runs[part]:
            return f"compiled, but {reasons}" if reasons else "compiled"
        return reasons or f"eager: {_UNCOMPILED.get(part, 'it ran no forward of its own')}"

    def add_to(self, stats: Stats) -> Stats:
        """The statistics with what was counted."""
        lines = [line for part in PARTS for line in self.reasons.get(part, ())]
        return replace(
            stats,
            compiled_forwards=self.forwards,
            compiled_graphs=self.graphs,
            not_compiled="; ".join(dict.fromkeys(lines)) or None,
            compile={part: self.describe(part) for part in PARTS},
        )


@dataclass
class Ledger:
    """Collects rounds into `Stats`."""

    recipe: str
    exact: bool
    drafter_saw: str
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    new_tokens: int = 0
    called_tokens: int = 0
    row_calls: int = 0
    calls: int = 0
    idle: int = 0
    fallback: str | None = None
    excess: float | None = None
    network_rows: int = 0
    unverified: int = 0
    prefill_steps: int = 0

    def add(self, round_: Round) -> None:
        """Count one round."""
        self.calls += round_.calls
        self.seconds.update(round_.seconds)
        self.fallback = self.fallback or round_.fallback
        if round_.excess is not None:
            self.excess = (self.excess or 0.0) + sum(round_.excess)
        for drafted, accepted, tokens in zip(
            round_.drafted, round_.accepted, round_.tokens, strict=True
        ):
            self.new_tokens += len(tokens)
            self.unverified += len(tokens) if round_.is_unverified else 0
            is_first = not round_.calls and not drafted  # taken from the prefill
            if round_.is_unverified or is_first or not tokens:
                continue
            self.called_tokens += len(tokens)
            self.row_calls += 1
            if drafted:
                self.prefill_steps += not round_.calls and not round_.index
                self.accepted.append(accepted)
                self.drafted.append(drafted)
                self.depths.append(min(round_.depth, drafted))
            else:
                self.idle += 1

    def follow(self, rounds: Iterable[Round]) -> Iterator[Round]:
        """Count rounds as they pass."""
        for kept in rounds:
            self.add(kept)
            yield kept

    def stats(self) -> Stats:
        """Everything counted so far."""
        steps, accepted = len(self.accepted), sum(self.accepted)
        histogram = _histogram(self.accepted, max(self.depths, default=0))
        by_length: dict[int, list[int]] = defaultdict(list)
        for depth, count in zip(self.depths, self.accepted, strict=True):
            by_length[depth].append(count)
        marginal = [_share(sum(histogram[i + 1 :]), steps) for i in range(len(histogram) - 1)]
        before = [1.0, *marginal]
        return Stats(
            recipe=self.recipe,
            exact=self.exact,
            drafter_saw=self.drafter_saw,
            num_new_tokens=self.new_tokens,
            num_spec_steps=steps,
            num_draft_tokens=sum(self.drafted),
            num_accepted_draft_tokens=accepted,
            mean_acceptance_length=1 + _share(accepted, steps),
            draft_acceptance_rate=_share(accepted, sum(self.drafted)),
            acceptance_histogram=histogram,
            acceptance_histogram_by_draft_length={
                depth: _histogram(counts, depth) for depth, counts in sorted(by_length.items())
            },
            per_position_acceptance=marginal,
            conditional_acceptance=[
                _share(now, then) for now, then in zip(marginal, before, strict=False)
            ],
            per_step_accepted=list(self.accepted),
            per_step_drafted=list(self.drafted),
            target_calls=self.calls,
            tokens_per_target_call=_share(self.called_tokens, self.row_calls),
            speculation_off_steps=self.idle,
            prefill_seconds=self.seconds["prefill"],
            draft_seconds=self.seconds["draft"],
            verify_seconds=self.seconds["verify"],
            host_seconds=self.seconds["host"],
            total_seconds=sum(self.seconds.values()),
            fallback=self.fallback,
            network_rows=self.network_rows,
            over_accepted_mass=(
                None if self.excess is None else _share(self.excess, self.called_tokens)
            ),
            unverified_tokens=self.unverified,
            prefill_steps=self.prefill_steps,
        )


def forecast_stats(
    recipe: str,
    full: int,
    kept: int,
    rejected: int,
    errors: Sequence[tuple[int, float]],
    skipped_work: float | None = None,
) -> Stats:
    """Statistics of a run that computes `full` steps and forecasts the others.

    A forecast is a draft of one step, accepted where it was `kept`; it is unverified, although a
    gate may have checked it. A forecast step computes what is not forecast: `skipped_work` is the
    share of the operations of computing all steps in full that were skipped.
    """
    accepted = [1] * kept + [0] * rejected
    drafted = [1] * len(accepted)
    ledger = Ledger(recipe, False, "nothing", accepted, drafted, list(drafted))
    ledger.new_tokens, ledger.called_tokens = full + kept, full + kept
    ledger.calls = ledger.row_calls = full
    ledger.unverified = kept
    return replace(ledger.stats(), forecast_errors=list(errors), skipped_work=skipped_work)


def _histogram(counts: Iterable[int], longest: int) -> list[int]:
    found = Counter(counts)
    return [found[length] for length in range(longest + 1)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
