"""What a trace of forecasts shows beside their steps: states as images, and errors of checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from mmspec.drafters.forecast.attached import NetworkCall
from mmspec.drafters.forecast.features import ForwardOverride
from mmspec.drafters.forecast.steps import networks_of

OBSERVERS = ("callback_on_step_end", "callback", "generator")  # not repeated in a decoding
RETURNS = {"output_type": "pil", "return_dict": True}
T = TypeVar("T")


class ForecastStates:
    """Decodes states of a pipeline's own loop, and holds the errors of its forecasts.

    The pipeline is called again with the same arguments; its scheduler returns the states, and its
    networks are computed once. Neither its generators nor the global ones are used.
    """

    def __init__(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        self.pipe, self.arguments = pipe, arguments
        self.timesteps = torch.empty(0)  # (N,)
        self.checks: list[dict[int, tuple[float, float | None]]] = []  # per row, by step from 1
        self.outputs: dict[tuple[int, int], Any] = {}  # of the networks, by their number of rows

    def add(self, timesteps: Tensor, index: int, calls: Sequence[NetworkCall], batch: int) -> None:
        """Add the errors of a step, and the timesteps (N,) of the whole call."""
        if not self.checks:
            self.timesteps, self.checks = timesteps.clone(), [{} for _ in range(batch)]
        for row, known in enumerate(self.checks):
            errors = [(take_row(one.errors, row), one.limit) for one in calls]
            found = [(error, limit) for error, limit in errors if error is not None]
            if found:
                known[index + 1] = max(found, key=lambda one: one[0])

    def decode(self, states: Tensor) -> list[Image.Image] | None:  # (B, *E)
        """Images of the states; None for pipelines of other outputs."""
        shown = copy.copy(self.pipe)
        bar = {**getattr(self.pipe, "_progress_bar_config", {}), "disable": True}
        shown.__dict__ |= {"scheduler": self._make_scheduler(states), "_progress_bar_config": bar}
        given = {name: value for name, value in self.arguments.items() if name not in OBSERVERS}
        given |= {name: value for name, value in RETURNS.items() if name in given}
        networks = enumerate(networks_of(self.pipe))
        overrides = [ForwardOverride(one, partial(self._call, index)) for index, one in networks]
        try:
            with torch.random.fork_rng(range(torch.cuda.device_count())):
                output = shown(**given, generator=torch.Generator().manual_seed(0))
        finally:
            for one in reversed(overrides):
                one.restore()
        images = vars(output).get("images")
        is_drawn = isinstance(images, list) and isinstance(images[0], Image.Image)
        return images if is_drawn else None

    def _make_scheduler(self, states: Tensor) -> Any:
        """A copy of the scheduler whose every step leads to `states`."""
        scheduler = copy.copy(self.pipe.scheduler)

        @wraps(scheduler.step)  # pipelines inspect the signature
        def step(model_output: Any, timestep: Any, sample: Tensor, *args: Any, **given: Any) -> Any:
            state = states.to(sample).repeat(len(sample) // len(states), *(1,) * (sample.dim() - 1))
            is_tuple = not given.get("return_dict", True)
            return (state, state) if is_tuple else SimpleNamespace(prev_sample=state)

        scheduler.step = step
        return scheduler

    def _call(self, network: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The output of a network, computed once for a number of rows."""
        rows = len(next(iter([*args, *kwargs.values()])))
        key = network, rows
        if key not in self.outputs:
            self.outputs[key] = original(*args, **kwargs)
        return self.outputs[key]


def take_row(values: Sequence[T], row: int) -> T:
    """The entry of a row; one for all rows is that of each."""
    return values[row % len(values)]
