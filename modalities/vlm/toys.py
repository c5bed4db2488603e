"""Tiny language models bound to a recipe, whose distributions can be counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from mmspec.api import Accelerated, accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.bench.tiny import joint, random_drafter, request, tiny
from mmspec.recipe import Recipe

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
PICTURES = ("pixels", "target-features", "prompt")  # sights of what no text model reads
ROOM = 48  # new tokens of an answer


def bound(recipe: Recipe, seed: int) -> Accelerated:
    """The recipe between two tiny models. Raises ValueError where it needs a picture."""
    target = tiny(seed=2 * seed)
    if not recipe.takes_drafter:
        return accelerate(target, recipe)
    small = random_drafter(recipe, target, seed=2 * seed + 1)
    sees = "nothing" if recipe.sees in PICTURES else recipe.sees
    return accelerate(target, replace(recipe, sees=sees), drafter=small)


def asked() -> dict[str, Any]:
    """One request, answered at length."""
    return {**request(1), "max_new_tokens": ROOM}


def writing(fast: Accelerated) -> Subject:
    """What a tiny model samples, and its own distribution."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        inputs = request(batch)
        rows = list(range(first, first + batch))
        out = fast.generate(**inputs, **SAMPLED, max_new_tokens=LENGTH + 2, seed=seed, row_ids=rows)
        refuse_fallback(out.stats)
        start = inputs["input_ids"].shape[1]
        sequences: Tensor = out.sequences
        return sequences[:, start : start + LENGTH]

    return Subject(joint(fast.model, LENGTH), sample)
