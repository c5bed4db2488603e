"""Measure MAR models: facts drawn right, and how closely a drafter follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image

from mmspec.codes.image_family import pictures
from mmspec.modalities.mar.zoo.models import GUIDANCE, HEAD_STEPS, LABELS, STEPS, label
from mmspec.models.mar import MarForImageGeneration
from mmspec.targets.patches import PatchSettings
from mmspec.training.fitting import chunks
from mmspec.zoo.reading import read_all

AT_ONCE = 34  # pictures
PLAN = PatchSettings(STEPS, GUIDANCE, head_steps=HEAD_STEPS, last_noise=True)


def classes(count: int, seed: int = 0) -> list[int]:
    """Classes to draw, spread over all."""
    return [(37 * (seed + index)) % len(LABELS) for index in range(count)]


@torch.no_grad()
def painted(
    model: MarForImageGeneration, vae: Any, asked: Sequence[int], seed: int = 0
) -> Iterator[Image.Image]:
    """Pictures of classes, drawn by the model itself."""
    for rows in chunks(range(len(asked)), AT_ONCE):
        part = torch.tensor([asked[row] for row in rows])
        latents = model.sample(part, PLAN, seed, rows)
        yield from pictures(vae.decode(latents / model.config.latent_scale)[0])


def facts_of(asked: Sequence[int], images: Sequence[Image.Image]) -> list[tuple[int, int]]:
    """Facts right and asked of each: one, whether it shows a thing of its class and no other."""
    return [
        (int([label(thing) for thing in scene.things] == [LABELS[number]]), 1)
        for number, scene in zip(asked, read_all(images), strict=True)
    ]


def facts_drawn(
    model: MarForImageGeneration, vae: Any, asked: Sequence[int], seed: int = 0
) -> tuple[int, int]:
    """Pictures that show their class and nothing else, and all pictures."""
    scored = facts_of(asked, list(painted(model, vae, asked, seed)))
    return sum(right for right, _ in scored), len(scored)
