"""What a trace of a pipeline shows: its steps by round, and some states decoded to images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmspec.modalities.diffusion.forecast_states import ForecastStates
from mmspec.modalities.diffusion.network import Network
from mmspec.modalities.diffusion.pipeline_trace import NoiseOptions, run_pipeline
from mmspec.tracing.media import image_uri
from mmspec.tracing.recorder import round_digits

MOST_STATES, SIDE = 8, 192  # states that are decoded, and their pixels
RETURNS = {"output_type": "pil", "return_dict": True}  # of a decoding, whatever the call asked for


def find_processor(formatter: Any) -> Any:
    """None: states are no text."""
    return None


@dataclass(frozen=True)
class StateDecoder:
    """Decodes states of a chain by the pipeline that sampled it.

    The pipeline's own call is run with the states in the place of its loop, so that they are
    decoded as its result is. Neither its generators nor the global ones are used.
    """

    pipe: Any
    network: Network
    arguments: Mapping[str, Any]  # of the call
    noises: NoiseOptions
    timesteps: Tensor  # (N,)

    def decode(self, states: Tensor) -> list[Image.Image] | None:  # (B, *E)
        """Images of the states; None for pipelines of other outputs."""
        own: dict[str, Any] = {"generator": torch.Generator().manual_seed(0)}
        own |= {name: value for name, value in RETURNS.items() if name in self.arguments}
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            output = run_pipeline(
                self.pipe,
                self.network,
                {**self.arguments, **own},
                lambda prepared: states.to(prepared.start),
                self.noises,
            )
        images = vars(output).get("images")
        is_drawn = isinstance(images, list) and isinstance(images[0], Image.Image)
        return images if is_drawn else None


@torch.no_grad()
def depict(session: Any, output: Any, trace: Any) -> dict[str, Any]:
    """The view `denoising`: of sampled chains, or of the steps of a pipeline with forecasts."""
    decoder, kept = trace.states, trace.recorder.states
    if decoder is None or not kept:
        return {}
    picked = [_spread(sorted(row)) for row in kept]
    latents: list[list[dict[str, Any]]] = [[] for _ in kept]
    for steps in zip(*picked, strict=False):
        states = [row[step] for row, step in zip(kept, steps, strict=True)]
        images = decoder.decode(torch.stack(states))
        for own, step, image in zip(latents, steps, images or (), strict=False):
            own.append({"step": step, "image": image_uri(image, SIDE)})
    timesteps = [round(float(one), 1) for one in decoder.timesteps]
    num_steps = max(len(row) for row in trace.list_tokens())
    view: dict[str, Any] = {
        "steps": num_steps,
        "timesteps": timesteps[:num_steps] if len(timesteps) >= num_steps else None,
        "latents": latents,
        "note": "" if any(latents) else "Its states are not images and are not shown.",
    }
    if isinstance(decoder, ForecastStates):
        view["checks"] = [_list_checks(row) for row in decoder.checks]
    return {"denoising": view}


def _list_checks(row: Mapping[int, tuple[float, float | None]]) -> dict[str, list[Any]]:
    """The error of each checked forecast and its limit, by step; None where not finite."""
    return {
        str(step): [None if one is None else round_digits(one) for one in pair]
        for step, pair in row.items()
    }


def _spread(steps: list[int]) -> list[int]:
    """At most `MOST_STATES` of the steps, the last one included."""
    count = min(MOST_STATES, len(steps))
    return [steps[-1 - at * len(steps) // count] for at in reversed(range(count))]
