"""Let a policy act in many worlds at once, greedily, and keep what it saw, thought and did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.modalities.vla.worlds.table import TableReach
from mmspec.training.reporting import Report, silent
from mmspec.zoo.scene import Split

_AT_ONCE = 64


@dataclass
class DrivenEpisode:
    """T steps: pictures (H, W, 3) uint8, tokens (7,), states (7,), features (D,), entropies (7,).

    A feature is the last hidden state behind the prompt; an entropy that of the distribution of a
    token, in bits.
    """

    instruction: str
    pictures: list[np.ndarray] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    is_success: bool = False


def drive(
    model: Any,
    processor: Any,
    space: ActionSpace,
    split: Split,
    seeds: Iterable[int],
    progress: Report = silent,
) -> list[DrivenEpisode]:
    """One episode for each seed."""
    given, found = list(seeds), []
    for start in range(0, len(given), _AT_ONCE):
        found += _together(model, processor, space, split, given[start : start + _AT_ONCE])
        progress("drive", len(found), len(given), float("nan"))
    return found


def _together(
    model: Any, processor: Any, space: ActionSpace, split: Split, seeds: list[int]
) -> list[DrivenEpisode]:
    worlds = [TableReach(split) for _ in seeds]
    begun = [world.reset(seed=seed) for world, seed in zip(worlds, seeds, strict=True)]
    episodes = [DrivenEpisode(info["instruction"]) for _, info in begun]
    seen = [observation for observation, _ in begun]
    going = list(range(len(worlds)))
    while going:
        for i in going:
            episodes[i].pictures.append(seen[i]["image"])
            episodes[i].states.append(seen[i]["state"])
        tokens, features, entropies = answers(
            model, processor, [episodes[i] for i in going], space.size
        )
        actions = space.unnormalise(space.values(tokens)).float().numpy()
        still = []
        for row, i in enumerate(going):
            episodes[i].tokens.append(tokens[row])
            episodes[i].features.append(features[row])
            episodes[i].entropies.append(entropies[row])
            seen[i], _, terminated, truncated, info = worlds[i].step(actions[row])
            episodes[i].is_success = info["is_success"]
            if not (terminated or truncated):
                still.append(i)
        going = still
    return episodes


@torch.no_grad()
def answers(
    model: Any, processor: Any, episodes: list[DrivenEpisode], size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What is said to the last pictures: tokens (B, D), features (B, H), entropies (B, D)."""
    asked = processor.instruct(
        [one.instruction for one in episodes], [one.pictures[-1] for one in episodes]
    )
    out = model.generate(
        **asked,
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
