"""Kalman filters over a robot's executed actions, one per component (KERV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.draft import Drafter
from mmspec.drafters.actions.history import ActionForecast, HistoryDrafter
from mmspec.drafters.lookup.prompt_lookup import length_of
from mmspec.errors import check_number, choose_option
from mmspec.recipe import Kit


def _check(one: RandomWalk | ConstantVelocity) -> None:
    for name in ("process", "measurement", "start"):
        if not getattr(one, name) > 0:
            raise ValueError(f"{name}={getattr(one, name)} is not a variance; give a value above 0")


@dataclass(frozen=True)
class RandomWalk:
    """A random walk per component; the forecast is the filtered value.

        P <- P + Q,   K = P / (P + R),   x <- x + K (z - x),   P <- (1 - K) P

    It starts at the first value with P = `start`. K tends to P / (P + R) with P = (Q + sqrt(Q^2 + 4
    Q R)) / 2: 0.9990 for the released constants of KERV (Zheng et al. 2026), which repeats the last
    action. Only ratios of the three variances matter. Raises ValueError for variances of 0 or
    below.
    """

    process: float = 1.0  # Q
    measurement: float = 1e-3  # R
    start: float = 10.0
    min_actions: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(self)

    def ahead(self, actions: Tensor, count: int) -> Tensor:  # (n, D) -> (count, D)
        return self.run_filter(actions).expand(count, -1)

    def run_filter(self, actions: Tensor) -> Tensor:  # (n, D) -> (D,)
        """The filtered value after the last action."""
        x, variance = actions[0], self.start
        for z in actions:
            variance += self.process
            gain = variance / (variance + self.measurement)
            x = x + gain * (z - x)
            variance *= 1 - gain
        return x


@dataclass(frozen=True)
class ConstantVelocity:
    """A constant velocity per component; exact on ramps after convergence.

    State (a, da), F = [[1, 1], [0, 1]], H = [1, 0], process noise Q [[1/4, 1/2], [1/2, 1]],
    measurement noise R; it starts at (z_1, 0) with P = `start` I. Reconstructed: the model, and the
    variances in normalised units. Raises ValueError for variances of 0 or below.
    """

    process: float = 1e-2  # Q
    measurement: float = 1e-2  # R
    start: float = 1.0
    min_actions: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check(self)

    def ahead(self, actions: Tensor, count: int) -> Tensor:  # (n, D) -> (count, D)
        position, speed = self.run_filter(actions)
        steps = torch.arange(1, count + 1, dtype=actions.dtype)[:, None]
        ahead: Tensor = position + steps * speed
        return ahead

    def run_filter(self, actions: Tensor) -> Tensor:  # (n, D) -> (2, D)
        """Value and velocity after the last action."""
        double = torch.float64
        move = torch.tensor([[1, 1], [0, 1]], dtype=double)
        noise = self.process * torch.tensor([[0.25, 0.5], [0.5, 1]], dtype=double)
        spread = self.start * torch.eye(2, dtype=double)
        x = torch.stack((actions[0], torch.zeros_like(actions[0])))
        for z in actions[1:]:
            x, spread = move @ x, move @ spread @ move.T + noise
            gain = spread[:, 0] / (spread[0, 0] + self.measurement)
            x = x + gain[:, None] * (z - x[0])
            spread = spread - torch.outer(gain, spread[0])
        return x


ActionFilter = RandomWalk | ConstantVelocity
MODELS: dict[str, ActionFilter] = {
    "constant_velocity": ConstantVelocity(),
    "random_walk": RandomWalk(),
}


def forecast_of(kit: Kit) -> ActionForecast:
    """The filter of the option `motion`: a name, or a filter object."""
    return choose_option("motion", kit.options["motion"], MODELS)


def kalman(kit: Kit) -> Drafter:
    """A Kalman filter over the robot's last actions."""
    window = kit.options["window"]
    if window is not None:
        check_number("window", window, 2, whole=True, example=10)
    return HistoryDrafter(kit.space, forecast_of(kit), length_of(kit), window)
