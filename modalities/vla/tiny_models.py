"""A tiny policy with actions of three components and few bins, to enumerate distributions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.codes.actions import ActionCodes, ActionDim, ActionSpace
from mmspec.codes.trajectories import Trajectories
from mmspec.modalities.common.tiny_models import (
    PROMPT,
    joint_distribution,
    random_drafter,
    request,
    tiny_llama,
)
from mmspec.recipe import Recipe

COUNT, TEXT = 5, 4  # bins; ids before them
DIMS = tuple(ActionDim(f"a{at}", "motion") for at in range(LENGTH))
SPACE = ActionSpace(DIMS, ActionCodes(TEXT + COUNT, COUNT))
HISTORY = ((0.25, -0.25, 0.75), (0.25, -0.75, 0.75))  # executed actions before each request


def bind_recipe(recipe: Recipe, seed: int) -> Accelerated:
    """Bind a recipe to a tiny model, with a draft model or head if it takes one.

    Raises ValueError if it cannot be bound to them.
    """
    target = tiny_llama(TEXT + COUNT, seed=2 * seed)
    parts: dict[str, Any] = {"actions": SPACE, "modality": "vla"}
    if recipe.takes_drafter:
        parts["drafter"] = random_drafter(recipe, target, seed=2 * seed + 1)
    if recipe.options.get("store", "none") is None:
        parts["store"] = _store(target.config.hidden_size, seed)
    return accelerate(target, recipe, **parts)


def _store(width: int, seed: int) -> Trajectories:
    """A store of two random episodes."""
    draws = torch.Generator().manual_seed(seed)
    shapes = ((20, width), (20, LENGTH))
    episodes = [[torch.randn(shape, generator=draws) for shape in shapes] for _ in range(2)]
    return Trajectories.from_episodes(
        (keys, actions.clamp(-1, 1), None) for keys, actions in episodes
    )


def tiny_request(batch: int = 1) -> dict[str, Tensor]:
    """Prompts, as tensors."""
    return request(batch, [one % TEXT for one in PROMPT])


def set_history(fast: Accelerated, robots: list[int]) -> None:
    """Reset robots and give them the same history."""
    fast.reset()
    for action in HISTORY:
        fast.observe(np.tile(action, (len(robots), 1)), robots=robots)


def action_subject(fast: Accelerated) -> Subject:
    """Samples of a tiny model after a history, and its own distribution of actions."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        robots = list(range(first, first + batch))
        set_history(fast, robots)
        fast.predict_action(**tiny_request(batch), robots=robots, temperature=1.0, seed=seed)
        assert fast.last_stats is not None
        refuse_fallback(fast.last_stats)
        tokens = [fast.steps(robot)[-1].tokens for robot in robots]
        return torch.tensor(tokens) - TEXT

    prompt = tiny_request()["input_ids"][0].tolist()
    return Subject(
        joint_distribution(fast.model, LENGTH, prompt, range(TEXT, TEXT + COUNT)), sample
    )
