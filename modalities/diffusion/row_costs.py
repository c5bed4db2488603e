"""Time of a denoising network's call by its number of states."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmspec.bench.reporting import read_clock
from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.diffusion.pipeline_trace import NoiseOptions, PreparedCall, run_pipeline

STATES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Costs:
    """Seconds of one call by number of states; a state includes the rows of guidance."""

    states: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, states: float) -> float:
        """Seconds of a call with this many states, interpolated linearly."""
        place = min(max(bisect_left(self.states, states), 1), len(self.states) - 1)
        low, high = self.states[place - 1], self.states[place]
        below, above = self.seconds[place - 1], self.seconds[place]
        return max(below + (states - low) / (high - low) * (above - below), self.seconds[0])

    def relative(self) -> dict[int, float]:
        """Times relative to a call of one state."""
        return dict(zip(self.states, (s / self.seconds[0] for s in self.seconds), strict=True))


@torch.no_grad()
def measure(
    pipe: Any, request: Mapping[str, Any], states: Sequence[int] = STATES, repeats: int = 5
) -> Costs:
    """Time the network of a pipeline with the conditions of a call, at two or more sizes."""
    known = inspect.signature(pipe.__call__).parameters.values()
    defaults = {one.name: one.default for one in known if one.default is not one.empty}
    found: list[Costs] = []

    def sample(prepared: PreparedCall) -> Tensor:
        found.append(_time_calls(prepared, sorted(states), repeats))
        return prepared.start

    run_pipeline(
        pipe,
        Network(pipe),
        {**defaults, **request, "output_type": "np"},
        sample,
        NoiseOptions(deterministic=True),
    )
    return found[0]


def _time_calls(prepared: PreparedCall, states: Sequence[int], repeats: int) -> Costs:
    start, device = prepared.start[:1], prepared.start.device
    times: dict[int, list[float]] = {count: [] for count in states}
    for repeat in range(repeats + 1):
        for count in states:
            batch = start.repeat(count, *(1,) * (start.dim() - 1))
            zeros = torch.zeros(count, dtype=torch.int64, device=device)
            started = read_clock(device)
            prepared.denoiser.predict(batch, zeros, zeros)
            if repeat:  # the first is a warm-up
                times[count].append(read_clock(device) - started)
    return Costs(tuple(states), tuple(median(times[count]) for count in states))
