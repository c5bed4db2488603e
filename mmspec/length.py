"""How long a draft may be: asked before each draw, never after it.

Whether a position is drafted may depend on anything known before its token is drawn. Dropping a
drawn token because of its own probability would bias the output, so no policy here sees tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspec.context import Context
from mmspec.draft import Round
from mmspec.laws import Categorical

log = logging.getLogger("mmspec")


@runtime_checkable
class Length(Protocol):
    """Decides how far to draft."""

    @property
    def most(self) -> int: ...  # the longest draft it may ask for
    def begin(self) -> Any: ...
    def budget(
        self, state: Any, context: Context
    ) -> int: ...  # tokens this round, 0 = a plain step
    def more(self, state: Any, law: Categorical) -> Tensor | None: ...  # (B,) bool; None = all rows
    def observe(self, state: Any, kept: Round) -> Any: ...


def parse(spec: int | str | Length) -> Length:
    """Read what users write: 5, "auto", "entropy", or a policy of their own."""
    if isinstance(spec, int) and not isinstance(spec, bool) and spec >= 0:
        return Fixed(spec)
    if isinstance(spec, str) and spec in _NAMED:
        return _NAMED[spec]()
    if not isinstance(spec, int | str) and isinstance(spec, Length):
        return spec
    raise ValueError(
        f"length={spec!r} is no draft length; give a number of tokens (0 or more), one of "
        f"{', '.join(repr(name) for name in _NAMED)}, or an object that is a mmspec.length.Length"
    )


def useful(context: Context) -> int:
    """The longest draft that can still be kept: every round adds a token of the target's own."""
    left = [
        context.request.room - context.generated(row)
        for row, finished in enumerate(context.finished)
        if not finished
    ]
    return max(max(left, default=0) - 1, 0)


@dataclass(frozen=True)
class Fixed:
    """Always `most` tokens; 0 is plain decoding."""

    most: int

    def __post_init__(self) -> None:
        _check(self.most, least=0)

    def begin(self) -> None:
        return None

    def budget(self, state: None, context: Context) -> int:
        return min(self.most, useful(context))

    def more(self, state: None, law: Categorical) -> Tensor | None:
        return None

    def observe(self, state: None, kept: Round) -> None:
        return None


@dataclass(frozen=True)
class Heuristic:
    """Two more after a draft kept whole, else one less (transformers' "heuristic" schedule).

    In a batch one whole row is enough to go up, as in BASS.
    """

    start: int = 5
    most: int = 20

    def __post_init__(self) -> None:
        _check(self.most)
        if not 1 <= self.start <= self.most:
            raise ValueError(f"start={self.start} lies outside 1..most={self.most}")

    def begin(self) -> int:
        return self.start

    def budget(self, state: int, context: Context) -> int:
        return min(state, useful(context))

    def more(self, state: int, law: Categorical) -> Tensor | None:
        return None

    def observe(self, state: int, kept: Round) -> int:
        tries = _tries(kept)
        if not tries:
            return state
        whole = any(accepted == tried for accepted, tried in tries)
        return min(state + 2, self.most) if whole else max(state - 1, 1)


@dataclass(frozen=True)
class Entropy:
    """Draft on while sqrt(c H(q)) <= h (SVIP, Zhang et al. 2024): stop where the drafter is unsure.

    H in nats; the square root bounds the rejection probability from above up to the factor c.
    """

    h: float = 0.3
    c: float = 0.15
    most: int = 10

    def __post_init__(self) -> None:
        _check(self.most)

    def begin(self) -> None:
        return None

    def budget(self, state: None, context: Context) -> int:
        return min(self.most, useful(context))

    def more(self, state: None, law: Categorical) -> Tensor:  # (B,) bool
        return _sure(law, self.h, self.c)

    def observe(self, state: None, kept: Round) -> None:
        return None


@dataclass
class _Level:
    """What `AdaptiveEntropy` learns during a request."""

    h: float
    rate: float


@dataclass(frozen=True)
class AdaptiveEntropy:
    """`Entropy` whose h is moved until a share `target` of the draft is accepted (AdaEDL, 2024).

    AdaEDL writes 1 - sqrt(c H(q)) >= lambda, which is h = 1 - lambda; lambda moves as in Draft &
    Verify: a smoothed step of `step` against the error of a smoothed acceptance rate.
    """

    target: float = 0.9
    h: float = 0.3
    c: float = 0.2
    step: float = 0.01
    most: int = 10

    def __post_init__(self) -> None:
        _check(self.most)
        if not 0 < self.target < 1:
            raise ValueError(
                f"target={self.target} is not an acceptance rate; give one within (0, 1)"
            )

    def begin(self) -> _Level:
        return _Level(self.h, self.target)

    def budget(self, state: _Level, context: Context) -> int:
        return min(self.most, useful(context))

    def more(self, state: _Level, law: Categorical) -> Tensor:  # (B,) bool
        return _sure(law, state.h, self.c)

    def observe(self, state: _Level, kept: Round) -> _Level:
        tries = _tries(kept)
        if tries:
            now = sum(accepted for accepted, _ in tries) / sum(tried for _, tried in tries)
            rate = 0.5 * state.rate + 0.5 * now
            wanted = state.h + self.step if rate > self.target else state.h - self.step
        else:  # nothing was drafted: without this a strict level would never be tested again
            rate, wanted = state.rate, state.h + self.step
        return _Level(min(max(0.9 * state.h + 0.1 * wanted, 0.0), 1.0), rate)


@dataclass(frozen=True)
class Confidence:
    """Draft on while the drafter's best token has at least probability `threshold`."""

    threshold: float = 0.4
    most: int = 10

    def __post_init__(self) -> None:
        _check(self.most)

    def begin(self) -> None:
        return None

    def budget(self, state: None, context: Context) -> int:
        return min(self.most, useful(context))

    def more(self, state: None, law: Categorical) -> Tensor:  # (B,) bool
        return _rows(_soft(law).amax(-1) >= self.threshold)

    def observe(self, state: None, kept: Round) -> None:
        return None


_START = 3  # tokens drafted until there is something to decide on
_RAMP = 4  # rounds at _START before plain rounds are measured
_PLAIN = 2  # plain rounds measured at first
_EVERY = 64  # then one plain round in so many
_PROOF = 8  # drafted rounds before speculation may be paused
_TRIAL = 3  # rounds of a probe
_PAUSE = (16, 1024)  # plain rounds before the first probe, and at most
_WINDOW = 15  # timings remembered per length
_DECAY = 0.95


@dataclass
class Goodput:
    """What `Auto` has learned: acceptance per position and seconds per round of each length."""

    tried: list[float]
    passed: list[float]
    seconds: dict[int, tuple[float, ...]] = field(default_factory=dict)  # by draft length
    batch: int = 0
    rounds: int = 0
    drafts: int = 0  # rounds in which something was drafted
    next: int = _START
    paused: bool = False
    pause: int = _PAUSE[0]
    until: int = 0  # round at which a pause, or else a probe, ends
    pauses: int = 0  # how often speculation was switched off
    plain: int = 0  # rounds decoded plainly because of that

    def copy(self) -> Goodput:
        seconds = dict(self.seconds)
        return replace(self, tried=list(self.tried), passed=list(self.passed), seconds=seconds)

    def rates(self) -> list[float]:
        """P(position i accepted, given the ones before); untried ones take their neighbour's."""
        rates, rate = [], 0.5
        for tried, passed in zip(self.tried, self.passed, strict=True):
            rate = (passed + rate) / (tried + 1)
            rates.append(rate)
        return rates

    def tokens(self) -> list[float]:
        """Expected tokens of a round that drafts 0, 1, ... tokens."""
        tokens, chance = [1.0], 1.0
        for rate in self.rates():
            chance *= rate
            tokens.append(tokens[-1] + chance)
        return tokens

    def cost(self, length: int) -> float:
        """Seconds of a round that drafts `length` tokens, linear between the lengths measured."""
        known = sorted(self.seconds)
        if length in self.seconds or len(known) == 1:
            return median_low(self.seconds[length if length in self.seconds else known[0]])
        above = next((index for index, other in enumerate(known) if other > length), len(known) - 1)
        low, high = known[max(above - 1, 0)], known[max(above, 1)]
        first, second = median_low(self.seconds[low]), median_low(self.seconds[high])
        slope = max(second - first, 0.0) / (high - low)
        anchor, start = (first, low) if length < high else (second, high)
        return max(anchor + slope * (length - start), 0.1 * first, 1e-9)

    def speeds(self, most: int) -> list[float]:
        """Expected tokens per second and row, up to a little beyond the lengths measured."""
        top = min(most, max(self.seconds) + 2)
        return [
            tokens / self.cost(length) for length, tokens in enumerate(self.tokens()[: top + 1])
        ]


@dataclass(eq=False)
class Auto:
    """The length with the most expected tokens per second, measured while decoding.

    Speculation is paused where plain decoding is faster, with one log message per object, and
    probed again after pauses that double. `learned` outlives a request: the next starts from it.
    """

    most: int = 8
    learned: Goodput = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check(self.most)
        self.learned = Goodput([0.0] * self.most, [0.0] * self.most, next=min(_START, self.most))

    def begin(self) -> Goodput:
        return self.learned.copy()

    def budget(self, state: Goodput, context: Context) -> int:
        return min(state.next, useful(context))

    def more(self, state: Goodput, law: Categorical) -> Tensor | None:
        return None

    def observe(self, state: Goodput, kept: Round) -> Goodput:
        self._measure(state, kept)
        if state.seconds:
            state.next = self._choose(state)
        self.learned = state
        return state

    def _measure(self, state: Goodput, kept: Round) -> None:
        if state.batch != len(kept.drafted):  # timings of another batch size say nothing
            state.seconds, state.batch = {}, len(kept.drafted)
        state.rounds += 1
        spent = sum(seconds for part, seconds in kept.seconds.items() if part != "prefill")
        depth = min(kept.depth, self.most)
        if spent > 0:
            state.seconds[depth] = (*state.seconds.get(depth, ())[-_WINDOW:], spent)
        tries = _tries(kept)
        state.drafts += bool(tries)
        for place in range(self.most):
            tested = sum(accepted >= place and tried > place for accepted, tried in tries)
            if tested:
                passed = sum(accepted > place and tried > place for accepted, tried in tries)
                state.tried[place] = _DECAY * state.tried[place] + tested
                state.passed[place] = _DECAY * state.passed[place] + passed

    def _choose(self, state: Goodput) -> int:
        if state.paused and state.rounds < state.until:
            state.plain += 1
            return 0
        speeds = state.speeds(self.most)
        best = max(range(1, len(speeds)), key=speeds.__getitem__, default=1)
        if state.paused:  # the pause is over: probe
            state.paused, state.until = False, state.rounds + _TRIAL
            return best
        if state.rounds < state.until:
            return best
        if state.rounds < _RAMP:
            return state.next
        if len(state.seconds.get(0, ())) < _PLAIN or state.rounds % _EVERY == 0:
            return 0
        if speeds[0] >= speeds[best] and state.drafts >= _PROOF:
            self._halt(state, speeds, best)
            return 0
        if state.until and state.rounds > state.until + _EVERY:  # it has paid for a while
            state.until, state.pause = 0, _PAUSE[0]
        return best

    def _halt(self, state: Goodput, speeds: Sequence[float], best: int) -> None:
        """Pause, and forget most of the acceptance seen so far, so that a probe counts."""
        if not state.pauses:
            log.warning(
                "speculation loses time and is paused: plain decoding makes %.1f tokens/s per row, "
                "drafts of %d would make %.1f (%.0f%% of first drafted tokens are accepted); it is "
                "probed again after %d rounds, then ever more rarely",
                *(speeds[0], best, speeds[best], 100 * state.rates()[0], state.pause),
            )
        state.pauses += 1
        state.plain += 1
        state.paused, state.until = True, state.rounds + state.pause
        state.pause = min(2 * state.pause, _PAUSE[1])
        for place, tried in enumerate(state.tried):
            share = min(1.0, 2 / tried) if tried else 0.0
            state.tried[place] *= share
            state.passed[place] *= share


_NAMED: dict[str, type[Auto | Heuristic | Entropy | AdaptiveEntropy | Confidence]] = {
    "auto": Auto,
    "heuristic": Heuristic,
    "entropy": Entropy,
    "adaptive-entropy": AdaptiveEntropy,
    "confidence": Confidence,
}


def _check(most: int, least: int = 1) -> None:
    if most < least:
        raise ValueError(f"most={most} is no draft length; give {least} or more")


def _tries(kept: Round) -> list[tuple[int, int]]:
    """Accepted and proposed depth of each row that drafted; rows cut by a stop say nothing."""
    rows = zip(kept.accepted, kept.drafted, kept.finished, strict=True)
    return [
        (accepted, min(drafted, kept.depth))
        for accepted, drafted, finished in rows
        if drafted and not finished
    ]


def _soft(law: Categorical) -> Tensor:  # (..., V)
    """Probabilities by the scores: a point mass would make a greedy drafter always sure."""
    return law.scores.float().softmax(-1)


def _sure(law: Categorical, h: float, c: float) -> Tensor:  # (B,) bool
    entropy = Categorical(law.scores.float()).entropy()
    return _rows(torch.sqrt(c * entropy.clamp_min(0)) <= h)


def _rows(answer: Tensor) -> Tensor:  # (B,) or (B, 1) -> (B,)
    return answer.reshape(answer.shape[0])
