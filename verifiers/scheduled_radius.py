"""A radius that decreases with the time since the robot's reset (the released code of KERV)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import get_episodes
from mmspec.errors import check_number
from mmspec.verifiers.action_tolerance import Radius


class Schedule(Protocol):
    """A radius for every share of the time."""

    def at(self, share: float, max_bins: float, min_bins: float) -> float: ...


@dataclass(frozen=True)
class CubicDecay:
    """low + (high - low) exp(-(t / tau)^3), tau = T / (ln 1e30)^(1/3) = 0.2437 T."""

    def at(self, share: float, max_bins: float, min_bins: float) -> float:
        return min_bins + (max_bins - min_bins) * math.exp(-math.log(1e30) * share**3)


@dataclass(frozen=True)
class ExponentialDecay:
    """high (low / high)^(t / T)."""

    def at(self, share: float, max_bins: float, min_bins: float) -> float:
        return float(max_bins * (min_bins / max_bins) ** share) if max_bins else 0.0


SCHEDULES: dict[str, Schedule] = {"cubic": CubicDecay(), "exponential": ExponentialDecay()}


@dataclass(frozen=True)
class ScheduledRadius(Radius):
    """A radius from `max_bins` at a reset to `min_bins` after `horizon` steps (KERV as released).

    It does not depend on kinematics: early actions have a large tolerance, late ones a small one.
    Steps after the horizon count as its last one. Strict components have 0.

    Raises ValueError for bounds that are not in order, or a horizon below one step.
    """

    space: ActionSpace
    schedule: Schedule = CubicDecay()
    max_bins: float = 15
    min_bins: float = 3
    horizon: int = 220

    def __post_init__(self) -> None:
        check_number("least", self.min_bins, 0, self.max_bins, example=3)
        check_number("most", self.max_bins, example=15)
        check_number("horizon", self.horizon, 1, whole=True, example=220)

    def __repr__(self) -> str:
        return (
            f"ScheduledRadius({self.max_bins:g} to {self.min_bins:g} bins in {self.horizon} steps)"
        )

    @property
    def is_zero(self) -> bool:
        return self.max_bins < 1

    def limits(self, context: Any) -> Tensor:  # (B, D)
        bins = [[self.radius(episode.step)] for episode in get_episodes(context)]
        return torch.tensor(bins, dtype=torch.float64) * ~self.space.is_strict

    def radius(self, step: int) -> float:
        """Bins at a step."""
        return self.schedule.at(min(step / self.horizon, 1.0), self.max_bins, self.min_bins)
