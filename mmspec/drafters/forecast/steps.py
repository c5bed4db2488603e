"""The networks of a pipeline, and the steps of a sampling call as seen from the networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmspec.drafters.forecast.features import tensors

NETWORKS = ("transformer", "transformer_2", "unet")
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


def networks_of(pipe: Any) -> list[nn.Module]:
    """The denoising networks of a pipeline, possibly wrapped by `torch.compile`.

    Two experts that alternate over the steps (Wan 2.2) are both returned.
    """
    found = [part for name, part in pipe.components.items() if name in NETWORKS]
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
