"""When to compute a denoising step in full, and when a forecast will do.

A schedule is a pure function of what happened to one sample so far; it sees no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Past:
    """What happened to one sample: the memory of a schedule."""

    steps: int = 0  # taken so far
    forecasts: int = 0  # in a row, since the last step in full
    is_full: bool = False  # whether the last step was in full
    error: float | None = None  # of the last checked forecast that was kept

    def in_full(self) -> Past:
        """After a step in full."""
        return Past(self.steps + 1, 0, True)

    def by_forecast(self, error: float | None) -> Past:
        """After a forecast, of which `error` is known if it was checked."""
        return Past(self.steps + 1, self.forecasts + 1, False, error)


class ForecastSchedule(Protocol):
    """Decides before a step; `progress` is the share of all steps taken, 0 at the noise end."""

    @property
    def has_checks(self) -> bool: ...
    @property
    def warm_up(self) -> int: ...  # differences of features begin with the last of these steps
    def wants_full(self, past: Past, progress: float) -> bool: ...
    def checks(self, past: Past) -> bool: ...  # whether the forecast to come is checked
    def threshold(self, progress: float) -> float: ...  # the largest error that passes


@dataclass(frozen=True)
class Cadence:
    """One step in full, then `interval` - 1 forecasts that nobody checks (TaylorSeer).

    The first `warm_up` steps are all in full.
    """

    interval: int = 5
    warm_up: int = 3

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval={self.interval} computes no step; use 1 (all in full) up")
        if self.warm_up < 1:
            raise ValueError(f"warm_up={self.warm_up} leaves nothing to forecast from; use 1 up")

    @property
    def has_checks(self) -> bool:
        return False

    def wants_full(self, past: Past, progress: float) -> bool:
        return past.steps < self.warm_up or past.forecasts >= self.interval - 1

    def checks(self, past: Past) -> bool:
        return False

    def threshold(self, progress: float) -> float:
        return float("inf")


@dataclass(frozen=True)
class DecayingThreshold:
    """SpeCa (Liu et al. 2025): forecasts run until one is off by more than the threshold.

    The threshold is max(base decay^progress, floor). Between two steps in full lie `least` to
    `most` forecasts, roughly: the first `least` of a run are not checked, and no run is longer than
    `most`. As in the published code, a step in full is never followed by another, so the
    `warm_up` steps come out as full, forecast, full, ...
    """

    base: float = 0.1
    decay: float = 0.01
    floor: float = 0.01
    least: int = 2
    most: int = 5
    warm_up: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} does not lower the threshold; use 0 < decay <= 1")
        if not 0 <= self.least <= self.most:
            raise ValueError(
                f"least={self.least} and most={self.most} leave no forecast to run; use "
                "0 <= least <= most"
            )
        if self.most < 1:
            raise ValueError(f"most={self.most} allows no forecast; use 1 up")

    @property
    def has_checks(self) -> bool:
        return True

    def wants_full(self, past: Past, progress: float) -> bool:
        if past.is_full:
            return False
        if past.steps < self.warm_up or past.steps == 0 or past.forecasts >= self.most:
            return True
        is_off = past.error is not None and past.error > self.threshold(progress)
        return is_off and past.forecasts >= self.least

    def checks(self, past: Past) -> bool:
        return past.forecasts >= self.least

    def threshold(self, progress: float) -> float:
        return max(self.base * math.pow(self.decay, progress), self.floor)


@dataclass(frozen=True)
class Stepwise:
    """How forecasts are executed: the pipeline's own loop, one step of the sampler at a time."""

    walk: str = "none"  # what is computed of a forecast step to verify it
    words: ClassVar[str] = "one step of the sampler at a time"
