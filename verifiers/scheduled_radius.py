"""A radius that falls with the time since the robot's reset (the released code of KERV)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import episodes_of
from mmspec.errors import check_number
from mmspec.verifiers.action_tolerance import Radius


class Schedule(Protocol):
    """A radius for every share of the time."""

    def at(self, share: float, most: float, least: float) -> float: ...


@dataclass(frozen=True)
class CubicDecay:
    """least + (most - least) exp(-(t / tau)^3), tau = T / (ln 1e30)^(1/3) = 0.2437 T."""

    def at(self, share: float, most: float, least: float) -> float:
        return least + (most - least) * math.exp(-math.log(1e30) * share**3)


@dataclass(frozen=True)
class ExponentialDecay:
    """most (least / most)^(t / T)."""

    def at(self, share: float, most: float, least: float) -> float:
        return float(most * (least / most) ** share) if most else 0.0


SCHEDULES: dict[str, Schedule] = {"cubic": CubicDecay(), "exponential": ExponentialDecay()}


@dataclass(frozen=True)
class ScheduledRadius(Radius):
    """A radius between `most` at a reset and `least` after `horizon` steps (KERV as released).

    No kinematics in it: early actions are checked loosely, late ones closely. Steps behind the
    horizon count as its last one. Strict components have 0.

    Raises ValueError for bounds that are not in order, or a horizon below one step.
    """

    space: ActionSpace
    schedule: Schedule = CubicDecay()
    most: float = 15
    least: float = 3
    horizon: int = 220

    def __post_init__(self) -> None:
        check_number("least", self.least, 0, self.most, example=3)
        check_number("most", self.most, example=15)
        check_number("horizon", self.horizon, 1, whole=True, example=220)

    def __repr__(self) -> str:
        return f"ScheduledRadius({self.most:g} to {self.least:g} bins in {self.horizon} steps)"

    @property
    def is_zero(self) -> bool:
        return self.most < 1

    def limits(self, context: Any) -> Tensor:  # (B, D)
        bins = [[self.radius(episode.step)] for episode in episodes_of(context)]
        return torch.tensor(bins, dtype=torch.float64) * ~self.space.is_strict

    def radius(self, step: int) -> float:
        """Bins at a step."""
        return self.schedule.at(min(step / self.horizon, 1.0), self.most, self.least)
