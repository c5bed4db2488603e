"""Tiny recognisers bound to a recipe, with distributions small enough to enumerate."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.models.loading import random_model
from mmspec.recipe import Recipe

BANDS, FRAMES, VOCABULARY, START = 4, 8, 6, 1
SAMPLED = {"temperature": 1.0, "top_k": 0}
MAX_NEW_TOKENS = 48


def tiny(seed: int = 0) -> Any:
    """A Whisper of random wide weights in float32, for a few frames of audio."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=BANDS,
        max_source_positions=FRAMES,
        max_target_positions=128,
        pad_token_id=0,
        bos_token_id=START,
        eos_token_id=None,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        tie_word_embeddings=False,
    )
    maker: Any = transformers.WhisperForConditionalGeneration
    model = random_model(lambda: maker(config), seed)
    model.generation_config.pad_token_id = (
        VOCABULARY  # outside the vocabulary: Whisper strips padding
    )
    return model


def bind_recipe(recipe: Recipe, seed: int) -> Accelerated:
    """The recipe between two tiny models. Raises ValueError where it sees what these do not."""
    target = tiny(2 * seed)
    if not recipe.takes_drafter:
        return accelerate(target, recipe)
    small = random_drafter(recipe, target, seed=2 * seed + 1)
    sees = recipe.sees if recipe.sees == "encoder" else "pixels"
    return accelerate(target, replace(recipe, sees=sees), drafter=small)


def tiny_features(batch: int = 1) -> dict[str, Any]:
    """The same features in every row."""
    noise = torch.Generator().manual_seed(0)
    features = torch.randn(1, BANDS, 2 * FRAMES, generator=noise)
    return {"input_features": features.expand(batch, -1, -1).contiguous()}


def make_request() -> dict[str, Any]:
    """One long request."""
    return {**tiny_features(), "max_new_tokens": MAX_NEW_TOKENS}


def make_subject(fast: Accelerated) -> Subject:
    """Samples of a tiny recogniser, and its own distribution."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        rows = list(range(first, first + batch))
        options = {"max_new_tokens": LENGTH + 2, "seed": seed, "row_ids": rows}
        out = fast.generate(**tiny_features(batch), **SAMPLED, **options)
        refuse_fallback(out.stats)
        sequences: Tensor = out.sequences
        return sequences[:, :LENGTH]

    return Subject(joint(fast.model, LENGTH), sample)


@torch.no_grad()
def joint(model: Any, length: int) -> Tensor:  # (V,) * length
    """The model's own distribution of its first `length` tokens, by enumeration."""
    mass = torch.ones((), dtype=torch.float64)
    for depth in range(length):
        prefixes = [[START, *more] for more in product(range(VOCABULARY), repeat=depth)]
        ids = torch.tensor(prefixes)
        logits = model(**tiny_features(len(ids)), decoder_input_ids=ids).logits[:, -1]
        mass = mass[..., None] * logits.double().softmax(-1).reshape(*mass.shape, VOCABULARY)
    return mass
