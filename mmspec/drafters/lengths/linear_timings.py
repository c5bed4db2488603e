"""Seconds of rounds as a line over their size."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean, median

_ROUNDS = 128  # that are remembered


class LinearTimings:
    """Seconds of the last rounds, as a line over their sizes.

    Rounds long ago count no more, nor do the slow first ones of a process: what is timed now and
    then keeps the line true. `from_zero`: nothing costs nothing, as of drafts, level by level.
    """

    def __init__(self, from_zero: bool = False, rounds: Iterable[tuple[int, float]] = ()) -> None:
        self.from_zero, self.rounds = from_zero, list(rounds)[-_ROUNDS:]

    def add(self, size: int, seconds: float) -> None:
        self.rounds = [*self.rounds[1 - _ROUNDS :], (size, seconds)]

    def copy(self) -> LinearTimings:
        return LinearTimings(self.from_zero, self.rounds)

    def __len__(self) -> int:
        return len(self.rounds)

    @property
    def largest(self) -> int:
        """The largest size that was timed lately; 1 where none was."""
        return max((size for size, _ in self.rounds), default=1)

    def line(self) -> tuple[float, float]:
        """Seconds of nothing, and of each further unit of size; neither is below 0.

        Of every size the median counts, as often as it was timed (least squares).
        """
        if self.from_zero:
            return 0.0, median(seconds / size for size, seconds in self.rounds)
        sizes = [size for size, _ in self.rounds]
        typical = {
            one: median(seconds for size, seconds in self.rounds if size == one)
            for one in set(sizes)
        }
        costs = [typical[size] for size in sizes]
        middle, mean = fmean(sizes), fmean(costs)
        spread = sum((size - middle) ** 2 for size in sizes)
        pairs = zip(sizes, costs, strict=True)
        leaning = sum((size - middle) * (cost - mean) for size, cost in pairs)
        slope = min(max(leaning / spread, 0.0), mean / middle) if spread else 0.0
        return mean - slope * middle, slope
