"""What a call of a denoising network costs by how many states it is shown."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmspec.bench.environment import seconds
from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.diffusion.pipeline_trace import Noises, PreparedCall, perform

STATES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Costs:
    """Seconds of one call by its number of states; guidance has its rows in every state."""

    states: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, states: float) -> float:
        """Seconds of a call of so many states: on the line between those measured."""
        place = min(max(bisect_left(self.states, states), 1), len(self.states) - 1)
        low, high = self.states[place - 1], self.states[place]
        below, above = self.seconds[place - 1], self.seconds[place]
        return max(below + (states - low) / (high - low) * (above - below), self.seconds[0])

    def relative(self) -> dict[int, float]:
        """In units of a call of one state."""
        return dict(zip(self.states, (s / self.seconds[0] for s in self.seconds), strict=True))


@torch.no_grad()
def measure(
    pipe: Any, asked: Mapping[str, Any], states: Sequence[int] = STATES, repeats: int = 5
) -> Costs:
    """Time the network of a pipeline under the conditions of a call. Needs two sizes at least."""
    known = inspect.signature(pipe.__call__).parameters.values()
    defaults = {one.name: one.default for one in known if one.default is not one.empty}
    found: list[Costs] = []

    def act(opening: PreparedCall) -> Tensor:
        found.append(_timed(opening, sorted(states), repeats))
        return opening.start

    perform(
        pipe,
        Network(pipe),
        {**defaults, **asked, "output_type": "np"},
        act,
        Noises(deterministic=True),
    )
    return found[0]


def _timed(opening: PreparedCall, states: Sequence[int], repeats: int) -> Costs:
    start, device = opening.start[:1], opening.start.device
    taken: dict[int, list[float]] = {many: [] for many in states}
    for lap in range(repeats + 1):
        for many in states:
            shown = start.repeat(many, *(1,) * (start.dim() - 1))
            zeros = torch.zeros(many, dtype=torch.int64, device=device)
            begun = seconds(device)
            opening.denoiser.predict(shown, zeros, zeros)
            if lap:  # the first is a warm-up
                taken[many].append(seconds(device) - begun)
    return Costs(tuple(states), tuple(median(taken[many]) for many in states))
