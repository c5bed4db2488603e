"""Evaluate MAR models: sampling settings, generated images and their score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image

from mmspec.codes.image_family import to_images
from mmspec.modalities.mar.checkpoints import facts_of
from mmspec.models.mar import MarForImageGeneration
from mmspec.targets.continuous.patches import PatchSettings
from mmspec.training.fitting import iterate_chunks
from tools.zoo.mar.models import GUIDANCE, HEAD_STEPS, STEPS

AT_ONCE = 34  # pictures
PLAN = PatchSettings(STEPS, GUIDANCE, head_steps=HEAD_STEPS, last_noise=True)


@torch.no_grad()
def generate_images(
    model: MarForImageGeneration, vae: Any, labels: Sequence[int], seed: int = 0
) -> Iterator[Image.Image]:
    """Images of classes, sampled by the model's own loop."""
    for rows in iterate_chunks(range(len(labels)), AT_ONCE):
        part = torch.tensor([labels[row] for row in rows])
        latents = model.sample(part, PLAN, seed, rows)
        yield from to_images(vae.decode(latents / model.config.latent_scale)[0])


def score_generated_images(
    model: MarForImageGeneration, vae: Any, labels: Sequence[int], seed: int = 0
) -> tuple[int, int]:
    """The number of images that show their class and nothing else, and of all images."""
    scored = facts_of(labels, list(generate_images(model, vae, labels, seed)))
    return sum(right for right, _ in scored), len(scored)
