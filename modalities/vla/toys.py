"""A tiny random model that says actions of three components: few bins, so that distributions count."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.api import Accelerated, accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.bench.tiny import PROMPT, joint, random_drafter, request, tiny
from mmspec.codes.actions import ActionCodes, ActionDim, ActionSpace
from mmspec.codes.trajectories import Trajectories
from mmspec.recipe import Recipe

COUNT, TEXT = 5, 4  # bins; ids before them
DIMS = tuple(ActionDim(f"a{at}", "motion") for at in range(LENGTH))
SPACE = ActionSpace(DIMS, ActionCodes(TEXT + COUNT, COUNT))
DONE = ((0.25, -0.25, 0.75), (0.25, -0.75, 0.75))  # what its robots did before


def bound(recipe: Recipe, seed: int) -> Accelerated:
    """The recipe on a tiny model, with another one or a head to draft for it.

    Raises ValueError where it cannot be bound to them.
    """
    target = tiny(TEXT + COUNT, seed=2 * seed)
    parts: dict[str, Any] = {"actions": SPACE, "modality": "vla"}
    if recipe.takes_drafter:
        parts["drafter"] = random_drafter(recipe, target, seed=2 * seed + 1)
    if recipe.options.get("store", "none") is None:
        parts["store"] = _store(target.config.hidden_size, seed)
    return accelerate(target, recipe, **parts)


def _store(width: int, seed: int) -> Trajectories:
    """Two episodes of walks at random, seen at random."""
    draws = torch.Generator().manual_seed(seed)
    shapes = ((20, width), (20, LENGTH))
    drawn = [[torch.randn(shape, generator=draws) for shape in shapes] for _ in range(2)]
    return Trajectories.of((seen, moves.clamp(-1, 1), None) for seen, moves in drawn)


def asked(batch: int = 1) -> dict[str, Tensor]:
    """Prompts, as tensors."""
    return request(batch, [one % TEXT for one in PROMPT])


def remember(fast: Accelerated, robots: list[int]) -> None:
    """Let robots begin anew, and have done the same few things."""
    fast.reset()
    for action in DONE:
        fast.observe(np.tile(action, (len(robots), 1)), robots=robots)


def acting(fast: Accelerated) -> Subject:
    """What a tiny model says behind a history, and its own distribution of actions."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        robots = list(range(first, first + batch))
        remember(fast, robots)
        fast.predict_action(**asked(batch), robots=robots, temperature=1.0, seed=seed)
        assert fast.last_stats is not None
        refuse_fallback(fast.last_stats)
        said = [fast.steps(robot)[-1].tokens for robot in robots]
        return torch.tensor(said) - TEXT

    prompt = asked()["input_ids"][0].tolist()
    return Subject(joint(fast.model, LENGTH, prompt, range(TEXT, TEXT + COUNT)), sample)
