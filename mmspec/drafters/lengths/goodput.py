"""The draft length with the highest throughput, learned while decoding."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from mmspec.draft import Round
from mmspec.drafters.lengths.length import (
    Fixed,
    Length,
    acceptance_counts,
    max_useful_length,
)
from mmspec.drafters.named import make_named
from mmspec.targets.tokens.context import Context

log = logging.getLogger("mmspec")

_START = 3  # tokens drafted until timings are known
_RAMP = 4  # rounds at _START before plain rounds are timed
_PLAIN = 2  # plain rounds timed at first
_EVERY = 64  # then one plain round per so many
_PROOF = 8  # drafted rounds before speculation may be paused
_TRIAL = 3  # rounds per probe
_PAUSE = (16, 1024)  # plain rounds before a probe: at first, at most
_DECAY = 0.95
_WINDOW = 15  # timings kept per size


class ForwardTimings(dict[int, tuple[float, ...]]):
    """The last timings of each draft length."""

    def add(self, size: int, seconds: float) -> None:
        self[size] = (*self.get(size, ())[-_WINDOW:], seconds)

    def cost(self, size: int) -> float:
        """Seconds of a round of this size: linear between measured sizes, extrapolated beyond them.

        Costs never decrease with size.
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


class BatchTimings(dict[int, ForwardTimings]):
    """Timings by number of rows, which changes between rounds where requests join and leave."""

    def at(self, batch: int) -> ForwardTimings:
        """Timings of so many rows.

        Lengths that were not timed with them are estimated from the nearest number of rows, scaled
        by the lengths that both have: a forward over more rows costs more at every length.
        """
        own = self.get(batch, ForwardTimings())
        others = [one for one in self if one != batch]
        if not others:
            return own
        near = self[min(others, key=lambda one: abs(math.log(one / batch)))]
        ratios = [own.cost(size) / near.cost(size) for size in own]
        scale = median_low(ratios) if ratios else 1.0
        made = ForwardTimings(own)
        for size in near.keys() - own.keys():
            made[size] = tuple(seconds * scale for seconds in near[size])
        return made


@dataclass
class Goodput:
    """The statistics of `Auto`: acceptance per position and seconds per round of each length."""

    num_tested: list[float]
    num_accepted: list[float]
    timed: BatchTimings = field(default_factory=BatchTimings)  # by rows and draft length
    batch: int = 0  # rows of the last round
    rounds: int = 0
    drafted_rounds: int = 0  # rounds with a draft
    next: int = _START
    is_paused: bool = False
    pause_rounds: int = _PAUSE[0]
    ends_at: int = 0  # round at which the pause or the probe ends
    pauses: int = 0  # how often speculation was paused
    plain_rounds: int = 0  # rounds decoded without a draft during pauses
    paused_batch: int = 0  # rows when speculation was paused

    @property
    def seconds(self) -> ForwardTimings:
        """Seconds by draft length, with the rows of the last round."""
        return self.timed.at(self.batch)

    def copy(self) -> Goodput:
        timed = BatchTimings({rows: ForwardTimings(one) for rows, one in self.timed.items()})
        return replace(
            self,
            num_tested=list(self.num_tested),
            num_accepted=list(self.num_accepted),
            timed=timed,
        )

    def rates(self) -> list[float]:
        """P(position i accepted | all before accepted); untested ones take their neighbour's."""
        rates, rate = [], 0.5
        for num_tested, num_accepted in zip(self.num_tested, self.num_accepted, strict=True):
            rate = (num_accepted + rate) / (num_tested + 1)
            rates.append(rate)
        return rates

    def tokens(self) -> list[float]:
        """Expected tokens of a round that drafts 0, 1, ... tokens."""
        tokens, chance = [1.0], 1.0
        for rate in self.rates():
            chance *= rate
            tokens.append(tokens[-1] + chance)
        return tokens

    def speeds(self, max_length: int) -> list[float]:
        """Expected tokens per second and row, up to two beyond the measured lengths."""
        seconds = self.seconds
        top = min(max_length, max(seconds) + 2)
        return [
            tokens / seconds.cost(length) for length, tokens in enumerate(self.tokens()[: top + 1])
        ]


@dataclass(eq=False)
class Auto(Length):
    """The length with the most expected tokens per second, measured while decoding.

    Speculation is paused where plain decoding is faster, with one log message per object, and
    probed again after pauses that double. `statistics` persist: the next request starts from them.
    """

    max_length: int = 8
    statistics: Goodput = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.statistics = Goodput(
            [0.0] * self.max_length, [0.0] * self.max_length, next=min(_START, self.max_length)
        )

    def begin(self) -> Goodput:
        return self.statistics.copy()

    def budget(self, state: Goodput, context: Context) -> int:
        return min(state.next, max_useful_length(context))

    def observe(self, state: Goodput, round_: Round) -> Goodput:
        self._measure(state, round_)
        if state.timed:
            state.next = self._choose(state)
        self.statistics = state
        return state

    def _measure(self, state: Goodput, round_: Round) -> None:
        state.batch = len(round_.drafted)
        state.rounds += 1
        spent = sum(seconds for part, seconds in round_.seconds.items() if part != "prefill")
        depth = min(round_.depth, self.max_length)
        if spent > 0:
            state.timed.setdefault(state.batch, ForwardTimings()).add(depth, spent)
        counts = acceptance_counts(round_)
        state.drafted_rounds += bool(counts)
        for place in range(self.max_length):
            tested = sum(
                accepted >= place and num_tested > place for accepted, num_tested in counts
            )
            if tested:
                num_accepted = sum(
                    accepted > place and num_tested > place for accepted, num_tested in counts
                )
                state.num_tested[place] = _DECAY * state.num_tested[place] + tested
                state.num_accepted[place] = _DECAY * state.num_accepted[place] + num_accepted

    def _choose(self, state: Goodput) -> int:
        is_smaller = 2 * state.batch <= state.paused_batch  # drafts cost less per token then
        if state.is_paused and state.rounds < state.ends_at and not is_smaller:
            state.plain_rounds += 1
            return 0
        speeds = state.speeds(self.max_length)
        best = max(range(1, len(speeds)), key=speeds.__getitem__, default=1)
        if state.is_paused:  # the pause is over: probe
            state.is_paused, state.ends_at = False, state.rounds + _TRIAL
            return best
        if state.rounds < state.ends_at:
            return best
        if state.rounds < _RAMP:
            return state.next
        if len(state.seconds.get(0, ())) < _PLAIN or state.rounds % _EVERY == 0:
            return 0
        if speeds[0] >= speeds[best] and state.drafted_rounds >= _PROOF:
            self._pause(state, speeds, best)
            return 0
        if (
            state.ends_at and state.rounds > state.ends_at + _EVERY
        ):  # it has been faster for a while
            state.ends_at, state.pause_rounds = 0, _PAUSE[0]
        return best

    def _pause(self, state: Goodput, speeds: Sequence[float], best: int) -> None:
        """Pause, and discount the acceptance counts, so that a probe can change them."""
        if not state.pauses:
            log.warning(
                "speculation is slower and is paused: plain decoding reaches %.1f tokens/s per "
                "row, drafts of %d would reach %.1f (%.0f%% of first drafted tokens are "
                "accepted); it is probed again after %d rounds, then less and less often",
                *(speeds[0], best, speeds[best], 100 * state.rates()[0], state.pause_rounds),
            )
        state.pauses += 1
        state.plain_rounds += 1
        state.is_paused, state.ends_at = True, state.rounds + state.pause_rounds
        state.paused_batch = state.batch
        state.pause_rounds = min(2 * state.pause_rounds, _PAUSE[1])
        for place, num_tested in enumerate(state.num_tested):
            share = min(1.0, 2 / num_tested) if num_tested else 0.0
            state.num_tested[place] *= share
            state.num_accepted[place] *= share


_NAMED = {  # module and class of each named length, imported on use
    "auto": "goodput.Auto",
    "heuristic": "length.Heuristic",
    "entropy": "length.Entropy",
    "adaptive-entropy": "length.AdaptiveEntropy",
    "confidence": "length.Confidence",
    "thompson": "thompson.Thompson",
    "specdec-pp": "learned.SpecDecPP",
    "disco": "learned.Disco",
}


def parse(spec: int | str | Length) -> Length:
    """Parse a draft length: 5, "auto", "entropy:h=0.4", "specdec-pp:head=FILE", or a `Length`."""
    if isinstance(spec, int) and not isinstance(spec, bool) and spec >= 0:
        return Fixed(spec)
    if isinstance(spec, Length):
        return spec
    made: Length | None = make_named(spec, _NAMED, "mmspec.drafters.lengths")
    if made is not None:
        return made
    raise ValueError(
        f"length={spec!r} is not a draft length; give a number of tokens (0 or more), one of "
        f"{', '.join(repr(name) for name in _NAMED)}, or a mmspec.drafters.lengths.length.Length"
    )
