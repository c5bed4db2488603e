"""Measure an image model: what it draws by itself, and facts drawn right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.distributions.sampling import guide
from mmspec.training.fitting import chunks
from mmspec.zoo import reading
from mmspec.zoo.prompts import Prompt
from mmspec.zoo.scene import Scene, tiled
from tools.zoo.image.coding import coded, pictures
from tools.zoo.image.models import GUIDANCE
from tools.zoo.image.training import PromptEncoder, Prompts, logits_of


def drawn_codes(
    model: Any, processor: Any, texts: Sequence[str], seed: int = 0
) -> Tensor:  # -> (B, 81) int64
    """Codes for prompts, sampled by the model itself at temperature 1."""
    asked = processor(text=list(texts), generation_mode="image", padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        codes: Tensor = model.generate(
            **asked,
            generation_mode="image",
            do_sample=True,
            top_k=0,
            guidance_scale=GUIDANCE,
        )
    return codes


@torch.no_grad()
def shown(model: Any, codes: Tensor) -> np.ndarray:  # (B, 81) -> (B, P, P, 3) floats in [0, 1]
    """The pictures of codes."""
    pixels: Tensor = model.decode_image_tokens(codes)
    return pixels.float().clamp(-1, 1).add(1).div(2).numpy()


def facts_drawn(model: Any, processor: Any, asked: Sequence[Prompt]) -> tuple[int, int]:
    """Facts right and facts asked over all prompts, read from the pictures."""

    def draw(texts: list[str], seed: int) -> np.ndarray:
        return shown(model, drawn_codes(model, processor, texts, seed))

    return reading.facts_drawn(asked, draw)


@torch.no_grad()
def spread(
    model: Any, processor: Any, texts: Sequence[str], batch: int = 32
) -> tuple[float, float]:
    """How hard its codes are to guess: nats per code of the guided distributions, share of the likeliest."""
    reader, nats, drawn = PromptEncoder(processor.tokenizer), [], []
    for turn, part in enumerate(chunks(texts, batch)):
        drawn.append(drawn_codes(model, processor, part, turn))
        told, silent = (logits_of(model, one, drawn[-1]) for one in branches(reader, list(part)))
        distribution = guide(told, silent, GUIDANCE).log_softmax(-1)
        nats.append(-(distribution.exp() * distribution).sum(-1))
    codes = torch.cat(drawn).flatten()
    return float(torch.cat(nats).mean()), float(torch.bincount(codes).max() / len(codes))


def facts_kept(model: Any, scenes: Sequence[Scene]) -> tuple[int, int]:
    """Facts right and facts asked in scenes drawn on tiles, coded and painted again."""
    generator = np.random.default_rng(len(scenes))
    tiles = [tiled(scene, generator) for scene in scenes]
    again = shown(model, coded(model.model.vqmodel, pictures(tiles)))
    return reading.score_pictures(scenes, list(again))


def branches(reader: PromptEncoder, texts: Sequence[str]) -> tuple[Prompts, Prompts]:
    """Prompts, and as many that say nothing."""
    return reader(texts), reader(texts, [True] * len(texts))
