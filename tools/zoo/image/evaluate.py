"""Evaluate an image model: its own samples, and correct facts in its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.distributions.sampling import guide
from mmspec.training.fitting import iterate_chunks
from mmspec.zoo import scene_parser as reading
from mmspec.zoo.prompts import Prompt
from mmspec.zoo.scene import Scene, add_tiles
from tools.zoo.image.coding import encode_images, render_images
from tools.zoo.image.models import GUIDANCE
from tools.zoo.image.training import PromptEncoder, Prompts, logits_of


def generate_codes(
    model: Any, processor: Any, texts: Sequence[str], seed: int = 0
) -> Tensor:  # -> (B, 81) int64
    """Codes for prompts, sampled by the model's own loop at temperature 1."""
    inputs = processor(text=list(texts), generation_mode="image", padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        codes: Tensor = model.generate(
            **inputs, generation_mode="image", do_sample=True, top_k=0, guidance_scale=GUIDANCE
        )
    return codes


@torch.no_grad()
def decode_codes(
    model: Any, codes: Tensor
) -> np.ndarray:  # (B, 81) -> (B, P, P, 3) floats in [0, 1]
    """Decode codes to images."""
    pixels: Tensor = model.decode_image_tokens(codes)
    return pixels.float().clamp(-1, 1).add(1).div(2).numpy()


def score_generated_images(
    model: Any, processor: Any, examples: Sequence[Prompt]
) -> tuple[int, int]:
    """Correct and total facts over all prompts, parsed from the generated images."""

    def draw(texts: list[str], seed: int) -> np.ndarray:
        return decode_codes(model, generate_codes(model, processor, texts, seed))

    return reading.score_drawn_prompts(examples, draw)


@torch.no_grad()
def code_statistics(
    model: Any, processor: Any, texts: Sequence[str], batch: int = 32
) -> tuple[float, float]:
    """Mean entropy of the guided distributions (nats per code), share of the commonest code."""
    reader, nats, samples = PromptEncoder(processor.tokenizer), [], []
    for index, part in enumerate(iterate_chunks(texts, batch)):
        samples.append(generate_codes(model, processor, part, index))
        conditional, unconditional = (
            logits_of(model, one, samples[-1]) for one in guidance_branches(reader, list(part))
        )
        distribution = guide(conditional, unconditional, GUIDANCE).log_softmax(-1)
        nats.append(-(distribution.exp() * distribution).sum(-1))
    codes = torch.cat(samples).flatten()
    return float(torch.cat(nats).mean()), float(torch.bincount(codes).max() / len(codes))


def score_reconstructions(model: Any, scenes: Sequence[Scene]) -> tuple[int, int]:
    """Correct and total facts in tiled scenes after encoding and decoding."""
    generator = np.random.default_rng(len(scenes))
    tiles = [add_tiles(scene, generator) for scene in scenes]
    again = decode_codes(model, encode_images(model.model.vqmodel, render_images(tiles)))
    return reading.score_pictures(scenes, list(again))


def guidance_branches(reader: PromptEncoder, texts: Sequence[str]) -> tuple[Prompts, Prompts]:
    """Encode prompts, conditional and unconditional."""
    return reader(texts), reader(texts, [True] * len(texts))
