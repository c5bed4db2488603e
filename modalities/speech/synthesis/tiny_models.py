"""A tiny codec language model and codec, with few enough codes to enumerate distributions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import EncodecConfig, EncodecModel

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.modalities.common.tiny_models import (
    PROMPT,
    joint_distribution,
    random_drafter,
    request,
    tiny_llama,
)
from mmspec.modalities.speech.synthesis.layout import SpeechCodes
from mmspec.models.loading import random_model
from mmspec.recipe import Recipe

COUNT, TEXT = 4, 4  # codes; ids before them: text, begin (3)
LAYOUT = SpeechCodes(TEXT, COUNT, begin=3, end=TEXT + COUNT)
MAX_NEW_CODES = 32


def tiny_codec(books: int = 1, size: int = COUNT, seed: int = 0) -> EncodecModel:
    """A causal Encodec of 1 kHz, eight samples per frame."""
    config = EncodecConfig(
        sampling_rate=1000,
        target_bandwidths=[0.125 * books * (size.bit_length() - 1)],
        upsampling_ratios=[4, 2],
        num_filters=4,
        hidden_size=8,
        codebook_dim=8,
        codebook_size=size,
        num_lstm_layers=1,
        compress=1,
        kernel_size=3,
        last_kernel_size=3,
    )
    codec: EncodecModel = random_model(lambda: EncodecModel(config), seed)
    with torch.no_grad():
        for name, table in codec.named_buffers():
            if name.endswith("codebook.embed"):
                table.normal_(generator=torch.Generator().manual_seed(seed))
    return codec


def bind_recipe(recipe: Recipe, seed: int) -> Accelerated:
    """Bind a recipe to a tiny model, with a draft model or head if it takes one.

    Raises ValueError if it cannot be bound to them.
    """
    size = LAYOUT.end + 1
    target = tiny_llama(size, seed=2 * seed)
    parts: dict[str, Any] = {"codec": tiny_codec(), "codes": LAYOUT, "modality": "tts"}
    if recipe.takes_drafter:
        parts["drafter"] = random_drafter(recipe, target, seed=2 * seed + 1)
    return accelerate(target, recipe, **parts)


def tiny_request(batch: int = 1) -> dict[str, Tensor]:
    """Prompts that begin speech."""
    return request(batch, [*(one % TEXT for one in PROMPT[:-1]), LAYOUT.begin])


def speech_subject(fast: Accelerated) -> Subject:
    """Samples of a tiny model, and its own distribution of codes, without text and end."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        rows = list(range(first, first + batch))
        options = {"seed": seed, "row_ids": rows, "min_new_tokens": LENGTH + 2}
        out = fast.synthesize(**tiny_request(batch), **options, max_new_tokens=LENGTH + 2)
        refuse_fallback(out.stats)
        return torch.stack([row[0, :LENGTH] for row in out.codes])

    prompt = tiny_request()["input_ids"][0].tolist()
    return Subject(
        joint_distribution(fast.model, LENGTH, prompt, range(TEXT, TEXT + COUNT)), sample
    )
