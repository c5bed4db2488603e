"""A radius that shrinks where accepted actions deviate from the robot's motion (KERV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode, get_episodes
from mmspec.errors import check_number
from mmspec.verifiers.action_tolerance import Radius


@dataclass(frozen=True)
class KinematicRadius(Radius):
    """r = round(clip(max - (max - min) K / reference, min, max)), K the variability (KERV).

    Zheng et al. 2026. An accepted token c_j with target token t_j deviates by |c_j - t_j| bins,
    divided by the standard deviation s_j of that component in the last `context` actions (at least
    one bin). K <- (1 - beta) K + beta times the mean of a step, 0 at a reset, so small deviations
    give the largest radius. Strict components have 0.

    Reconstructed: the formula, beta, and the `reference`, which the paper measures per task; 1 is a
    deviation as large as the robot's recent spread. Raises ValueError for bounds below 0 or in the
    wrong order, beta outside [0, 1], and a reference of 0.
    """

    space: ActionSpace
    min_bins: float = 5
    max_bins: float = 15
    reference: float = 1.0
    beta: float = 0.3
    context: int = 10
    is_adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("least", self.min_bins, 0, self.max_bins, example=5)
        check_number("beta", self.beta, 0, 1, example=0.3)
        check_number("context", self.context, 2, whole=True, example=10)
        if not self.reference > 0:
            raise ValueError(f"reference={self.reference}; give a variability above 0, such as 1")

    def __repr__(self) -> str:
        return f"KinematicRadius({self.min_bins:g} to {self.max_bins:g} bins)"

    @property
    def is_zero(self) -> bool:
        return self.max_bins < 1

    def limits(self, context: Any) -> Tensor:  # (B, D)
        bins = [[self.radius(episode)] for episode in get_episodes(context)]
        return torch.tensor(bins, dtype=torch.float64) * ~self.space.is_strict

    def radius(self, episode: Episode) -> int:
        """Bins at this step."""
        share = min(self.variability(episode) / self.reference, 1.0)
        return round(self.max_bins - (self.max_bins - self.min_bins) * share)

    def variability(self, episode: Episode) -> float:
        """K after the steps so far."""
        found = 0.0
        for one in episode.deviations:
            found = (1 - self.beta) * found + self.beta * one
        return found

    def record_deviation(
        self, episode: Episode, dims: Sequence[int], bins: Sequence[float]
    ) -> None:
        bin_ = 2 / (self.space.codes.bins - 1)
        recent = episode.recent(self.context)
        spread = recent.std(0) if len(recent) > 1 else torch.zeros(self.space.size)
        scale = spread.clamp_min(bin_).tolist()
        episode.step_deviations += [
            off * bin_ / scale[at] for at, off in zip(dims, bins, strict=True)
        ]
