"""Measure a text-to-image pipeline: facts drawn right, and how closely a drafter follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmspec.zoo import reading
from mmspec.zoo.prompts import Prompt
from tools.zoo.diffusion.models import GUIDANCE, STEPS
from tools.zoo.diffusion.training import TextStates, predicted

if TYPE_CHECKING:
    from diffusers import PixArtAlphaPipeline, PixArtTransformer2DModel

WORDS_AT_MOST = 40  # tokens of a prompt; the pipeline's own default costs time on padding


def draw(
    pipeline: PixArtAlphaPipeline, texts: Sequence[str], seed: int = 0, steps: int = STEPS
) -> np.ndarray:  # -> (B, P, P, 3) floats in [0, 1]
    """Pictures for prompts, by the pipeline itself. Sizes are not binned: there is only one."""
    pipeline.set_progress_bar_config(disable=True)
    call: Any = pipeline
    pictures: np.ndarray = call(
        list(texts),
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=WORDS_AT_MOST,
        use_resolution_binning=False,
        clean_caption=False,
        output_type="np",
    ).images
    return pictures


def facts_drawn(
    pipeline: PixArtAlphaPipeline, asked: Sequence[Prompt], steps: int = STEPS
) -> tuple[int, int]:
    """Facts right and facts asked over all prompts, read from the pictures."""
    return reading.facts_drawn(asked, lambda texts, seed: draw(pipeline, texts, seed, steps))


@torch.no_grad()
def overlap(
    drafter: PixArtTransformer2DModel,
    pipeline: PixArtAlphaPipeline,
    texts: Sequence[str],
    seed: int = 0,
    steps: int = STEPS,
) -> float:
    """Mean over the steps of pictures of the chance that the drafter's next state is kept.

    At each state on the way of the target, with equal deviations s and means d apart: the shared
    mass of two normal distributions, 2 Phi(-d / 2 s). The last step has no deviation and is left
    out.
    """
    states = _states(pipeline, texts, seed, steps)
    parts: Any = pipeline
    alphas = parts.scheduler.alphas_cumprod
    words = _told(pipeline, texts)
    stride = len(alphas) // steps
    kept = []
    for time, state in states[:-1]:
        signal, before = alphas[time], alphas[time - stride]
        wanted, offered = (
            _guided(model, state, time, words) for model in (parts.transformer, drafter)
        )
        step = 1 - signal / before
        weight = before.sqrt() * step / (1 - signal)  # of the clean picture, in the mean
        deviation = (step * (1 - before) / (1 - signal)).sqrt()
        apart = weight * (1 - signal).sqrt() * (wanted - offered).flatten(1).norm(dim=1)
        kept.append(torch.special.erfc(apart / (2 * deviation) / 2**0.5))
    return round(float(torch.stack(kept).mean()), 4)


def _states(
    pipeline: PixArtAlphaPipeline, texts: Sequence[str], seed: int, steps: int
) -> list[tuple[int, Tensor]]:
    """The times and the states that the target itself passes through."""
    parts: Any = pipeline
    parts.scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(seed)
    side, channels = parts.transformer.config.sample_size, parts.transformer.config.in_channels
    state = torch.randn(len(texts), channels, side, side, generator=generator)
    words = _told(pipeline, texts)
    passed = []
    for time in parts.scheduler.timesteps:
        passed.append((int(time), state))
        raw = _guided(parts.transformer, state, int(time), words)
        state = parts.scheduler.step(raw, time, state, generator=generator).prev_sample
    return passed


def _told(pipeline: PixArtAlphaPipeline, texts: Sequence[str]) -> TextStates:
    """The words of the prompts, after as many rows of silence."""
    parts: Any = pipeline
    told, mask, silence, silent_mask = parts.encode_prompt(
        list(texts), max_sequence_length=WORDS_AT_MOST
    )
    return TextStates(torch.cat([silence, told]), torch.cat([silent_mask, mask]))


def _guided(model: PixArtTransformer2DModel, state: Tensor, time: int, words: TextStates) -> Tensor:
    times = torch.full((2 * len(state),), time)
    silent, told = predicted(model, torch.cat([state, state]), times, words).chunk(2)
    return silent + GUIDANCE * (told - silent)
