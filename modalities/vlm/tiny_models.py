"""Tiny language models bound to a recipe, whose output distributions can be enumerated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.modalities.common.tiny_models import (
    joint_distribution,
    random_drafter,
    request,
    tiny_llama,
)
from mmspec.recipe import Recipe

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
PICTURES = ("pixels", "target-features", "prompt")  # `sees` of multimodal recipes
MAX_NEW_TOKENS = 48


def bind_recipe(recipe: Recipe, seed: int) -> Accelerated:
    """Bind a recipe to two tiny models. Raises ValueError if it needs an image."""
    target = tiny_llama(seed=2 * seed)
    if not recipe.takes_drafter:
        return accelerate(target, recipe)
    small = random_drafter(recipe, target, seed=2 * seed + 1)
    sees = "nothing" if recipe.sees in PICTURES else recipe.sees
    return accelerate(target, replace(recipe, sees=sees), drafter=small)


def make_request() -> dict[str, Any]:
    """Return a request of one row."""
    return {**request(1), "max_new_tokens": MAX_NEW_TOKENS}


def make_subject(fast: Accelerated) -> Subject:
    """Return the sampler of a tiny model, and its exact joint distribution."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        inputs = request(batch)
        rows = list(range(first, first + batch))
        out = fast.generate(**inputs, **SAMPLED, max_new_tokens=LENGTH + 2, seed=seed, row_ids=rows)
        refuse_fallback(out.stats)
        start = inputs["input_ids"].shape[1]
        sequences: Tensor = out.sequences
        return sequences[:, start : start + LENGTH]

    return Subject(joint_distribution(fast.model, LENGTH), sample)
