"""The `callback_on_step_end` of diffusers for chains that verify several steps per round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from torch import Tensor

from mmspec.errors import format_value
from mmspec.modalities.diffusion.pipeline_trace import PreparedCall

StepObserver = Callable[[Tensor], None]  # called with the states (B, *E) after every step, in order


@dataclass(frozen=True)
class StepCallback:
    """A user's callback, called with the latents of a step once all images have passed it.

    Later steps may have been sampled already, so the callback must be read-only: requests for other
    tensors than "latents", changed latents and changes of the pipeline (a copy is passed) raise
    ValueError. In inpainting pipelines the last latents still contain the noised known part.
    """

    call: Callable[..., Any] | None

    @classmethod
    def of(cls, given: dict[str, Any]) -> StepCallback:
        """Remove the callback from a call's arguments. Raises ValueError for unsupported ones."""
        if given.get("callback") is not None:
            raise ValueError("callback is deprecated; give callback_on_step_end instead")
        call = given.pop("callback_on_step_end", None)
        if call is not None and not callable(call):
            raise ValueError(
                f"callback_on_step_end={format_value(call)} is not callable; give a function of "
                "the pipeline, the step, its timestep and the tensors"
            )
        names = given.get("callback_on_step_end_tensor_inputs") or ["latents"]
        if isinstance(call, PipelineCallback | MultiPipelineCallbacks):
            names = call.tensor_inputs  # as pipelines do
        if call is not None and list(names) != ["latents"]:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs={list(names)} has more than the states of a "
                'chain; give ["latents"], or use the recipes speca and taylorseer'
            )
        return cls(call)

    def observe(self, prepared: PreparedCall) -> StepObserver:
        """An observer that calls the callback with the states after each step of a chain."""
        timesteps, steps = prepared.timesteps, iter(range(len(prepared.timesteps)))

        def observe_states(states: Tensor) -> None:
            step = next(steps)
            if self.call is not None:
                after = min(step + 1, len(timesteps) - 1)
                latents = prepared.restore_latents(states, after).to(prepared.dtype)
                self._call(prepared.pipe, step, timesteps[step], latents)

        return observe_states

    def _call(self, pipe: Any, step: int, timestep: Tensor, latents: Tensor) -> None:
        assert self.call is not None
        before = dict(vars(pipe))
        output = self.call(pipe, step, timestep, {"latents": latents.clone()}) or {}
        changed = [
            name
            for name, value in output.items()
            if name != "latents" or not torch.equal(value, latents)
        ]
        now = vars(pipe).items()
        changed += [f"pipe.{name}" for name, value in now if before.get(name) is not value]
        if changed:
            raise ValueError(
                f"callback_on_step_end changes {', '.join(changed)} in step {step}, but later "
                "steps are already sampled; make it read-only, or use the recipes speca and "
                "taylorseer"
            )
