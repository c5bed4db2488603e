"""Greedy episodes of a policy in many environments at once, with its states and entropies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.modalities.vla.worlds.table import TableReach
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.zoo.scene import Split

_AT_ONCE = 64


@dataclass
class PolicyEpisode:
    """T steps: pictures (H, W, 3) uint8, tokens (7,), states (7,), features (D,), entropies (7,).

    A feature is the last hidden state of the prompt; an entropy is that of the distribution of a
    token, in bits.
    """

    instruction: str
    pictures: list[np.ndarray] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    is_success: bool = False


def run_episodes(
    model: Any,
    processor: Any,
    space: ActionSpace,
    split: Split,
    seeds: Iterable[int],
    progress: TrainingProgress = silent,
) -> list[PolicyEpisode]:
    """Run one episode per seed."""
    given, found = list(seeds), []
    for start in range(0, len(given), _AT_ONCE):
        found += _run_batch(model, processor, space, split, given[start : start + _AT_ONCE])
        progress("drive", len(found), len(given), float("nan"))
    return found


def _run_batch(
    model: Any, processor: Any, space: ActionSpace, split: Split, seeds: list[int]
) -> list[PolicyEpisode]:
    worlds = [TableReach(split) for _ in seeds]
    resets = [world.reset(seed=seed) for world, seed in zip(worlds, seeds, strict=True)]
    episodes = [PolicyEpisode(info["instruction"]) for _, info in resets]
    observations = [observation for observation, _ in resets]
    active = list(range(len(worlds)))
    while active:
        for i in active:
            episodes[i].pictures.append(observations[i]["image"])
            episodes[i].states.append(observations[i]["state"])
        tokens, features, entropies = predict_tokens(
            model, processor, [episodes[i] for i in active], space.size
        )
        actions = space.unnormalise(space.decode(tokens)).float().numpy()
        remaining = []
        for row, i in enumerate(active):
            episodes[i].tokens.append(tokens[row])
            episodes[i].features.append(features[row])
            episodes[i].entropies.append(entropies[row])
            observations[i], _, terminated, truncated, info = worlds[i].step(actions[row])
            episodes[i].is_success = info["is_success"]
            if not (terminated or truncated):
                remaining.append(i)
        active = remaining
    return episodes


@torch.no_grad()
def predict_tokens(
    model: Any, processor: Any, episodes: list[PolicyEpisode], size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions for the last pictures: tokens (B, D), features (B, H), entropies (B, D)."""
    inputs = processor.instruct(
        [one.instruction for one in episodes], [one.pictures[-1] for one in episodes]
    )
    out = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=size,
        min_new_tokens=size,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_logits=True,
    )
    distributions = torch.stack(out.logits, 1).float().softmax(-1)
    bits = -(distributions * distributions.clamp_min(1e-12).log2()).sum(-1)
    return out.sequences[:, -size:], out.hidden_states[0][-1][:, -1], bits
