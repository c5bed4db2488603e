"""Measure MAR models: facts drawn right, and how closely a drafter follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image

from mmspec.codes.image_family import pictures
from mmspec.modalities.mar.held_out import facts_of
from mmspec.models.mar import MarForImageGeneration
from mmspec.targets.continuous.patches import PatchSettings
from mmspec.training.fitting import chunks
from tools.zoo.mar.models import GUIDANCE, HEAD_STEPS, STEPS

AT_ONCE = 34  # pictures
PLAN = PatchSettings(STEPS, GUIDANCE, head_steps=HEAD_STEPS, last_noise=True)


@torch.no_grad()
def painted(
    model: MarForImageGeneration, vae: Any, asked: Sequence[int], seed: int = 0
) -> Iterator[Image.Image]:
    """Pictures of classes, drawn by the model itself."""
    for rows in chunks(range(len(asked)), AT_ONCE):
        part = torch.tensor([asked[row] for row in rows])
        latents = model.sample(part, PLAN, seed, rows)
        yield from pictures(vae.decode(latents / model.config.latent_scale)[0])


def facts_drawn(
    model: MarForImageGeneration, vae: Any, asked: Sequence[int], seed: int = 0
) -> tuple[int, int]:
    """Pictures that show their class and nothing else, and all pictures."""
    scored = facts_of(asked, list(painted(model, vae, asked, seed)))
    return sum(right for right, _ in scored), len(scored)
