"""The `callback_on_step_end` of diffusers, for chains whose steps are verified many at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from torch import Tensor

from mmspec.errors import described
from mmspec.modalities.diffusion.pipeline_trace import PreparedCall

Watch = Callable[[Tensor], None]  # the states (B, *E) behind every step, in order


@dataclass(frozen=True)
class StepCallback:
    """What a user wants to see of every step: the latents, once all pictures have passed it.

    Steps behind it may have been taken already, so the callback may look and not touch: it is
    refused other tensors than "latents", an answer that changes them, and a change of the pipeline,
    of which it is shown a copy. Where a picture is pasted into the latents the last ones still have
    its noised part.
    """

    call: Callable[..., Any] | None

    @classmethod
    def of(cls, given: dict[str, Any]) -> StepCallback:
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
        if isinstance(call, PipelineCallback | MultiPipelineCallbacks):
            names = call.tensor_inputs  # pipelines read it there too
        if call is not None and list(names) != ["latents"]:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs={list(names)} asks for more than the states of"
                ' a chain; give ["latents"], or use the recipes speca and taylorseer'
            )
        return cls(call)

    def shown(self, opening: PreparedCall) -> Watch:
        """Called with the states behind each step of the chain that begins here."""
        timesteps, steps = opening.timesteps, iter(range(len(opening.timesteps)))

        def watch(states: Tensor) -> None:
            step = next(steps)
            if self.call is not None:
                after = min(step + 1, len(timesteps) - 1)
                latents = opening.whole(states, after).to(opening.dtype)
                self._show(opening.pipe, step, timesteps[step], latents)

        return watch

    def _show(self, pipe: Any, step: int, timestep: Tensor, latents: Tensor) -> None:
        assert self.call is not None
        before = dict(vars(pipe))
        answer = self.call(pipe, step, timestep, {"latents": latents.clone()}) or {}
        changed = [
            name
            for name, value in answer.items()
            if name != "latents" or not torch.equal(value, latents)
        ]
        now = vars(pipe).items()
        changed += [f"pipe.{name}" for name, value in now if before.get(name) is not value]
        if changed:
            raise ValueError(
                f"callback_on_step_end changes {', '.join(changed)} in step {step}, but later "
                "steps are taken already; let it look only, or use the recipes speca and taylorseer"
            )
