"""The networks of a pipeline, and the steps of a sampling call as seen from the networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.drafters.forecast.features import tensors
from mmspec.models.quantized_pipelines import find_denoisers

TIMES = ("timestep", "timesteps", "t")  # parameter names of the timestep


@dataclass
class StepClock:
    """Counts the steps of a sampling call: a new one begins where the time changes."""

    step: int = -1
    time: list[float] | None = None

    def step_at(self, time: list[float]) -> int:
        """The step of a call at `time`."""
        if time != self.time:
            self.time, self.step = time, self.step + 1
        return self.step


class SamplerClock(StepClock):
    """A clock that also reads where the current step is in the schedule of a diffusers scheduler.

    Both experts of a pipeline share it. The timesteps are those of the call in progress.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler

    @property
    def steps(self) -> int:
        """Number of steps of the sampling call."""
        return len(self._times) - self._begin

    @property
    def is_complete(self) -> bool:
        """Whether the last step was reached."""
        return self.step + 1 >= self.steps

    @property
    def timestep(self) -> float:
        """The current timestep on a scale from 1000 (noise) to 0."""
        trained = self._scheduler.config.get("num_train_timesteps", 1000)
        return 1000 * float(self._times[self._place]) / int(trained)

    @property
    def noise(self) -> float:
        """The share of noise in the current states, sigma / (alpha + sigma); t of a flow."""
        sigmas = getattr(self._scheduler, "sigmas", None)
        if sigmas is not None and len(sigmas):
            levels = sigmas.unique_consecutive()
            level = float(levels[min(self._place, len(levels) - 1)])
            return level if float(levels.max()) <= 1 else level / (1 + level)
        kept = float(self._scheduler.alphas_cumprod[int(self._times[self._place])])
        return math.sqrt(1 - kept) / (math.sqrt(kept) + math.sqrt(1 - kept))

    @property
    def _times(self) -> Tensor:  # (N,), those that a solver evaluates twice once
        found: Tensor = self._scheduler.timesteps.unique_consecutive()
        return found

    @property
    def _place(self) -> int:
        """The index of the current step in the schedule."""
        return min(self._begin + self.step, len(self._times) - 1)

    @property
    def _begin(self) -> int:
        """Number of first steps that are left out, as with an initial image."""
        begin = getattr(self._scheduler, "begin_index", None) or 0
        return int(begin) // int(getattr(self._scheduler, "order", 1))


def networks_of(pipe: Any) -> list[nn.Module]:
    """The denoising networks of a pipeline, possibly wrapped by `torch.compile`.

    Two experts that alternate over the steps (Wan 2.2) are both returned.
    """
    found = [pipe.components[name] for name in find_denoisers(pipe.components)]
    networks = [part for part in found if isinstance(part, nn.Module)]
    if not networks:
        raise ValueError(
            f"{type(pipe).__name__} has no transformer or unet to forecast; its components are "
            f"{', '.join(pipe.components)}"
        )
    return networks


def check_finite(output: Any, step: int) -> None:
    """Raises ValueError for NaN or infinite values in the output of a network."""
    if not all(bool(part.isfinite().all()) for part in tensors(output)):
        raise ValueError(
            f"the network's output is NaN or infinite in step {step}; run the model in a wider "
            "dtype or check its inputs"
        )


def time_of(arguments: Mapping[str, Any]) -> list[float]:
    """The timesteps that a network is called with, from the arguments of its signature."""
    for name in TIMES:
        if name in arguments:
            found: list[float] = torch.as_tensor(arguments[name]).flatten().tolist()
            return found
    raise ValueError(
        f"the network is called without a timestep (none of {', '.join(TIMES)} among "
        f"{', '.join(arguments)}), so its steps cannot be distinguished; this pipeline is not "
        "supported"
    )
