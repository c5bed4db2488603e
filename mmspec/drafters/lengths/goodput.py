"""The draft length that makes most tokens per second, learned while decoding."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from mmspec.draft import Round
from mmspec.drafters.lengths.length import (
    AdaptiveEntropy,
    Confidence,
    Entropy,
    Fixed,
    Heuristic,
    Length,
    tries,
    useful,
)
from mmspec.targets.tokens.context import Context

log = logging.getLogger("mmspec")

_START = 3  # tokens drafted until there is something to decide on
_RAMP = 4  # rounds at _START before plain rounds are measured
_PLAIN = 2  # plain rounds measured at first
_EVERY = 64  # then one plain round in so many
_PROOF = 8  # drafted rounds before speculation may be paused
_TRIAL = 3  # rounds of a probe
_PAUSE = (16, 1024)  # plain rounds before the first probe, and at most
_DECAY = 0.95
_WINDOW = 15  # timings remembered per size


class Timings(dict[int, tuple[float, ...]]):
    """The last timings of each size, in tokens of a draft."""

    def add(self, size: int, seconds: float) -> None:
        self[size] = (*self.get(size, ())[-_WINDOW:], seconds)

    def cost(self, size: int) -> float:
        """Seconds of a round of this size, linear between the sizes measured.

        Beyond them it goes on as between the last two, and costs never fall.
        """
        known = sorted(self)
        if size in self or len(known) == 1:
            return median_low(self[size if size in self else known[0]])
        above = next((index for index, other in enumerate(known) if other > size), len(known) - 1)
        low, high = known[max(above - 1, 0)], known[max(above, 1)]
        first, second = median_low(self[low]), median_low(self[high])
        slope = max(second - first, 0.0) / (high - low)
        anchor, start = (first, low) if size < high else (second, high)
        return max(anchor + slope * (size - start), 0.1 * first, 1e-9)


@dataclass
class Goodput:
    """What `Auto` has learned: acceptance per position and seconds per round of each length."""

    tried: list[float]
    passed: list[float]
    seconds: Timings = field(default_factory=Timings)  # by draft length
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
        seconds = Timings(self.seconds)
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

    def speeds(self, most: int) -> list[float]:
        """Expected tokens per second and row, up to a little beyond the lengths measured."""
        top = min(most, max(self.seconds) + 2)
        return [
            tokens / self.seconds.cost(length)
            for length, tokens in enumerate(self.tokens()[: top + 1])
        ]


@dataclass(eq=False)
class Auto(Length):
    """The length with the most expected tokens per second, measured while decoding.

    Speculation is paused where plain decoding is faster, with one log message per object, and
    probed again after pauses that double. `learned` outlives a request: the next starts from it.
    """

    most: int = 8
    learned: Goodput = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.learned = Goodput([0.0] * self.most, [0.0] * self.most, next=min(_START, self.most))

    def begin(self) -> Goodput:
        return self.learned.copy()

    def budget(self, state: Goodput, context: Context) -> int:
        return min(state.next, useful(context))

    def observe(self, state: Goodput, kept: Round) -> Goodput:
        self._measure(state, kept)
        if state.seconds:
            state.next = self._choose(state)
        self.learned = state
        return state

    def _measure(self, state: Goodput, kept: Round) -> None:
        if state.batch != len(kept.drafted):  # timings of another batch size say nothing
            state.seconds, state.batch = Timings(), len(kept.drafted)
        state.rounds += 1
        spent = sum(seconds for part, seconds in kept.seconds.items() if part != "prefill")
        depth = min(kept.depth, self.most)
        if spent > 0:
            state.seconds.add(depth, spent)
        seen = tries(kept)
        state.drafts += bool(seen)
        for place in range(self.most):
            tested = sum(accepted >= place and tried > place for accepted, tried in seen)
            if tested:
                passed = sum(accepted > place and tried > place for accepted, tried in seen)
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


_NAMED: dict[str, Callable[[], Length]] = {
    "auto": Auto,
    "heuristic": Heuristic,
    "entropy": Entropy,
    "adaptive-entropy": AdaptiveEntropy,
    "confidence": Confidence,
}


def parse(spec: int | str | Length) -> Length:
    """Read what users write: 5, "auto", "entropy", or a policy of their own."""
    if isinstance(spec, int) and not isinstance(spec, bool) and spec >= 0:
        return Fixed(spec)
    if isinstance(spec, str) and spec in _NAMED:
        return _NAMED[spec]()
    if isinstance(spec, Length):
        return spec
    raise ValueError(
        f"length={spec!r} is no draft length; give a number of tokens (0 or more), one of "
        f"{', '.join(repr(name) for name in _NAMED)}, or a mmspec.drafters.lengths.length.Length"
    )
