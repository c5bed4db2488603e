"""Schedules of full and forecast denoising steps.

A schedule is a pure function of the history of one sample, without tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class SampleHistory:
    """The history of one sample: the state of a schedule."""

    steps: int = 0  # taken so far
    forecasts: int = 0  # consecutive, since the last full step
    is_full: bool = False  # whether the last step was full
    error: float | None = None  # of the last checked forecast that was accepted

    def after_full_step(self) -> SampleHistory:
        """The history after a full step."""
        return SampleHistory(self.steps + 1, 0, True)

    def after_forecast(self, error: float | None) -> SampleHistory:
        """The history after a forecast, with its `error` if it was checked."""
        return SampleHistory(self.steps + 1, self.forecasts + 1, False, error)


class ForecastSchedule(Protocol):
    """Decides before a step; `progress` is the share of all steps taken, 0 at the noise end."""

    @property
    def has_checks(self) -> bool: ...
    @property
    def warm_up(self) -> int: ...  # differences of features begin with the last of these steps
    def needs_full_step(self, past: SampleHistory, progress: float) -> bool: ...
    def is_checked(self, past: SampleHistory) -> bool: ...  # whether the next forecast is checked
    def threshold(self, progress: float) -> float: ...  # the largest accepted error


@dataclass(frozen=True)
class Cadence:
    """One full step, then `interval` - 1 unchecked forecasts (TaylorSeer).

    The first `warm_up` steps are all full.
    """

    interval: int = 5
    warm_up: int = 3

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(
                f"interval={self.interval} must be at least 1, which is all full steps"
            )
        if self.warm_up < 1:
            raise ValueError(f"warm_up={self.warm_up} must be at least 1, to forecast from")

    @property
    def has_checks(self) -> bool:
        return False

    def needs_full_step(self, past: SampleHistory, progress: float) -> bool:
        return past.steps < self.warm_up or past.forecasts >= self.interval - 1

    def is_checked(self, past: SampleHistory) -> bool:
        return False

    def threshold(self, progress: float) -> float:
        return float("inf")


@dataclass(frozen=True)
class DecayingThreshold:
    """Forecasts continue until the error of one exceeds the threshold (SpeCa, Liu et al. 2025).

    The threshold is max(base decay^progress, floor). Between two full steps are about `least` to
    `most` forecasts: the first `least` of a run are not checked, and no run is longer than `most`.
    As in the published code, a full step is never followed by another, so the `warm_up` steps
    alternate between full and forecast.
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

    def needs_full_step(self, past: SampleHistory, progress: float) -> bool:
        if past.is_full:
            return False
        if past.steps < self.warm_up or past.steps == 0 or past.forecasts >= self.most:
            return True
        is_off = past.error is not None and past.error > self.threshold(progress)
        return is_off and past.forecasts >= self.least

    def is_checked(self, past: SampleHistory) -> bool:
        return past.forecasts >= self.least

    def threshold(self, progress: float) -> float:
        return max(self.base * math.pow(self.decay, progress), self.floor)


@dataclass(frozen=True)
class Stepwise:
    """Execution of forecasts in the pipeline's own loop, one sampler step at a time."""

    walk: str = "none"  # what is computed of a forecast step to verify it
    description: ClassVar[str] = "one step of the sampler at a time"
