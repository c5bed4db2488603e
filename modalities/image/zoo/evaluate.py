"""Measure an image model: facts drawn right, likelihoods, and how closely a drafter follows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.laws.sampling import guide
from mmspec.modalities.image.zoo.coding import coded, pictures
from mmspec.modalities.image.zoo.models import GUIDANCE
from mmspec.modalities.image.zoo.training import Prompts, Reader, logits_of
from mmspec.zoo.prompts import Prompt
from mmspec.zoo.reading import read_all, score_picture
from mmspec.zoo.scene import Scene


def drawn_codes(
    model: Any, processor: Any, texts: Sequence[str], seed: int = 0, guidance: float = GUIDANCE
) -> Tensor:  # -> (B, 81) int64
    """Codes for prompts, sampled by the model itself at temperature 1. `guidance` is above 1."""
    asked = processor(text=list(texts), generation_mode="image", padding=True, return_tensors="pt")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        codes: Tensor = model.generate(
            **asked,
            generation_mode="image",
            do_sample=True,
            top_k=0,
            guidance_scale=guidance,
        )
    return codes


@torch.no_grad()
def shown(model: Any, codes: Tensor) -> np.ndarray:  # (B, 81) -> (B, P, P, 3) floats in [0, 1]
    """The pictures of codes."""
    pixels: Tensor = model.decode_image_tokens(codes)
    return pixels.float().clamp(-1, 1).add(1).div(2).numpy()


def facts_drawn(
    model: Any,
    processor: Any,
    asked: Sequence[Prompt],
    seed: int = 0,
    guidance: float = GUIDANCE,
    batch: int = 32,
) -> tuple[int, int]:
    """Facts right and facts asked over all prompts, read from the pictures."""
    right, total = 0, 0
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        codes = drawn_codes(model, processor, [p.text for p in part], seed + start, guidance)
        for prompt, scene in zip(part, read_all(list(shown(model, codes))), strict=True):
            scored = score_picture(prompt.scene, scene)
            right, total = right + scored[0], total + scored[1]
    return right, total


def facts_kept(model: Any, scenes: Sequence[Scene]) -> tuple[int, int]:
    """Facts right and facts asked in scenes that were drawn, coded and painted again."""
    read = read_all(list(shown(model, coded(model.model.vqmodel, pictures(scenes)))))
    scored = [score_picture(s, r) for s, r in zip(scenes, read, strict=True)]
    return sum(right for right, _ in scored), sum(asked for _, asked in scored)


@torch.no_grad()
def guided_laws(
    model: Any, reader: Reader, texts: Sequence[str], codes: Tensor, guidance: float = GUIDANCE
) -> Tensor:  # (B, 81) -> (B, 81, K) log-probabilities
    """The laws of every code of pictures, given the prompt and the codes before it."""
    logits = [logits_of(model, prompts, codes) for prompts in branches(reader, texts)]
    return guide(logits[0], logits[1], guidance).log_softmax(-1)


def branches(reader: Reader, texts: Sequence[str]) -> tuple[Prompts, Prompts]:
    """Prompts, and as many that say nothing."""
    return reader(texts), reader(texts, [True] * len(texts))


def likelihood(
    model: Any, reader: Reader, texts: Sequence[str], codes: Tensor, guidance: float = GUIDANCE
) -> Tensor:  # (B, 81) -> (B,)
    """Mean log-probability of a picture's codes under the model."""
    laws = guided_laws(model, reader, texts, codes, guidance)
    return laws.gather(-1, codes[..., None])[..., 0].mean(-1)


def acceptance(
    drafter: Any,
    target: Any,
    processor: Any,
    texts: Sequence[str],
    seed: int = 0,
    guidance: float = GUIDANCE,
    batch: int = 16,
) -> float:
    """Codes per round of coupled chain speculation with five drafted codes, at temperature 1."""
    fast = accelerate(target, "coupled", drafter=drafter, processor=processor)
    lengths = []
    for start in range(0, len(texts), batch):
        told = list(texts[start : start + batch])
        made = fast.generate_images(prompt=told, do_sample=True, guidance=guidance, seed=seed)
        lengths += [made.stats.mean_acceptance_length] * len(told)
    return round(fmean(lengths), 2)
