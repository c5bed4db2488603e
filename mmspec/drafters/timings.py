"""Seconds of rounds by their size, between and a little beyond the sizes measured."""

from __future__ import annotations

from statistics import median_low

_WINDOW = 15  # timings remembered per size


class Timings(dict[int, tuple[float, ...]]):
    """The last timings of each size, such as tokens of a draft or nodes of a tree."""

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
