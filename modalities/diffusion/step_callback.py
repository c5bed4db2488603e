"""The `callback_on_step_end` of diffusers, for chains whose steps are verified many at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import described
from mmspec.modalities.diffusion.pipeline_trace import PreparedCall

Watch = Callable[[Tensor], None]  # the states (B, *E) behind every step, in order


@dataclass(frozen=True)
class StepCallback:
    """What a user wants to see of every step: the latents, once all pictures have passed it.

    Steps behind it may have been taken already, so the callback may look and not touch: it is
    refused other tensors than "latents", and an answer that changes them or stops the pipeline.
    Where a picture is pasted into the latents the last ones still have its noised part.
    """

    pipe: Any
    call: Callable[..., Any] | None

    @classmethod
    def of(cls, given: dict[str, Any], pipe: Any) -> StepCallback:
        """Taken out of a call's arguments `given`. Raises ValueError for what cannot be served."""
        if given.get("callback") is not None:
            raise ValueError("callback is the old form of callback_on_step_end; give that instead")
        call = given.pop("callback_on_step_end", None)
        if call is not None and not callable(call):
            raise ValueError(
                f"callback_on_step_end={described(call)} cannot be called; give a function of the "
                "pipeline, the step, its timestep and the tensors"
            )
        names = given.get("callback_on_step_end_tensor_inputs") or ["latents"]
        if call is not None and list(names) != ["latents"]:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs={list(names)} asks for more than the states of"
                ' a chain; give ["latents"], or use the recipes speca and taylorseer'
            )
        return cls(pipe, call)

    def shown(self, opening: PreparedCall) -> Watch:
        """Called with the states behind each step of the chain that begins here."""
        timesteps, steps = opening.timesteps, iter(range(len(opening.timesteps)))

        def watch(states: Tensor) -> None:
            step = next(steps)
            if self.call is not None:
                after = min(step + 1, len(timesteps) - 1)
                latents = opening.whole(states, after).to(opening.dtype)
                self._show(step, timesteps[step], latents)

        return watch

    def _show(self, step: int, timestep: Tensor, latents: Tensor) -> None:
        assert self.call is not None
        stopped = vars(self.pipe).get("_interrupt")
        answer = self.call(self.pipe, step, timestep, {"latents": latents.clone()}) or {}
        same = all(
            name == "latents" and torch.equal(value, latents) for name, value in answer.items()
        )
        if not same or vars(self.pipe).get("_interrupt") != stopped:
            raise ValueError(
                f"callback_on_step_end changes {', '.join(answer) or 'the course'} in step {step}, "
                "but later steps are taken already; let it look only, or use the recipes speca and "
                "taylorseer"
            )
