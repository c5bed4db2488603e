"""Evaluate a text-to-image pipeline: correct facts in images, and acceptance of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmspec.zoo import scene_parser as reading
from mmspec.zoo.prompts import Prompt
from tools.zoo.diffusion.models import GUIDANCE, STEPS
from tools.zoo.diffusion.training import TextStates, predict_velocity

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, PixArtAlphaPipeline, PixArtTransformer2DModel

MAX_SEQUENCE_LENGTH = 40  # tokens of a prompt; the pipeline's own default costs time on padding
_OPTIONS = {  # of PixArt
    "max_sequence_length": MAX_SEQUENCE_LENGTH,
    "use_resolution_binning": False,
    "clean_caption": False,
}


def generate_images(
    pipeline: DiffusionPipeline,
    texts: Sequence[str],
    seed: int = 0,
    steps: int = STEPS,
    guidance: float = GUIDANCE,
) -> np.ndarray:  # -> (B, P, P, 3) floats in [0, 1]
    """Images of prompts, by the pipeline's own call, without resolution binning."""
    pipeline.set_progress_bar_config(disable=True)
    call: Any = pipeline
    known = signature(call.__call__).parameters
    pictures: np.ndarray = call(
        list(texts),
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **{name: value for name, value in _OPTIONS.items() if name in known},
    ).images
    return pictures


def score_generated_images(
    pipeline: DiffusionPipeline,
    examples: Sequence[Prompt],
    steps: int = STEPS,
    guidance: float = GUIDANCE,
) -> tuple[int, int]:
    """Correct and total facts over all prompts, parsed from the generated images."""
    return reading.score_drawn_prompts(
        examples, lambda texts, seed: generate_images(pipeline, texts, seed, steps, guidance)
    )


@torch.no_grad()
def state_overlap(
    drafter: PixArtTransformer2DModel,
    pipeline: PixArtAlphaPipeline,
    texts: Sequence[str],
    seed: int = 0,
    steps: int = STEPS,
) -> float:
    """Mean acceptance probability of the drafter's next state over the steps.

    For each state of the target's trajectory this is the overlap 2 Phi(-d / 2 s) of two normal
    distributions with std s and means d apart. The last step has std 0 and is omitted.
    """
    states = _sample_trajectory(pipeline, texts, seed, steps)
    parts: Any = pipeline
    alphas = parts.scheduler.alphas_cumprod
    text = _encode_prompts(pipeline, texts)
    stride = len(alphas) // steps
    overlaps = []
    for time, state in states[:-1]:
        signal, before = alphas[time], alphas[time - stride]
        expected, drafted = (
            _predict_guided(model, state, time, text) for model in (parts.transformer, drafter)
        )
        step = 1 - signal / before
        weight = before.sqrt() * step / (1 - signal)  # of the clean picture, in the mean
        deviation = (step * (1 - before) / (1 - signal)).sqrt()
        distance = weight * (1 - signal).sqrt() * (expected - drafted).flatten(1).norm(dim=1)
        overlaps.append(torch.special.erfc(distance / (2 * deviation) / 2**0.5))
    return round(float(torch.stack(overlaps).mean()), 4)


def _sample_trajectory(
    pipeline: PixArtAlphaPipeline, texts: Sequence[str], seed: int, steps: int
) -> list[tuple[int, Tensor]]:
    """The timesteps and states of the target's own sampling."""
    parts: Any = pipeline
    parts.scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(seed)
    side, channels = parts.transformer.config.sample_size, parts.transformer.config.in_channels
    state = torch.randn(len(texts), channels, side, side, generator=generator)
    text = _encode_prompts(pipeline, texts)
    passed = []
    for time in parts.scheduler.timesteps:
        passed.append((int(time), state))
        raw = _predict_guided(parts.transformer, state, int(time), text)
        state = parts.scheduler.step(raw, time, state, generator=generator).prev_sample
    return passed


def _encode_prompts(pipeline: PixArtAlphaPipeline, texts: Sequence[str]) -> TextStates:
    """Text states of the prompts, preceded by as many empty prompts."""
    parts: Any = pipeline
    states, mask, empty, empty_mask = parts.encode_prompt(
        list(texts), max_sequence_length=MAX_SEQUENCE_LENGTH
    )
    return TextStates(torch.cat([empty, states]), torch.cat([empty_mask, mask]))


def _predict_guided(
    model: PixArtTransformer2DModel, state: Tensor, time: int, text: TextStates
) -> Tensor:
    times = torch.full((2 * len(state),), time)
    unconditional, conditional = predict_velocity(
        model, torch.cat([state, state]), times, text
    ).chunk(2)
    return unconditional + GUIDANCE * (conditional - unconditional)
