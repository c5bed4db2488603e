"""Measure a policy: success on held-out goals, how sure it is, and how far its last action goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.codes.actions import ActionSpace
from mmspec.modalities.vla.judging import wilson
from tools.zoo.vla.driving import DrivenEpisode


def figures(episodes: Sequence[DrivenEpisode], space: ActionSpace) -> dict[str, float]:
    """Success and its 95 % interval, steps, entropy (bits) of each component, and `held`."""
    count, won = len(episodes), sum(one.is_success for one in episodes)
    low, high = wilson(won, count)
    report = {
        "episodes": count,
        "success": won / count,
        "success_from": low,
        "success_to": high,
        "steps_per_episode": sum(len(one.tokens) for one in episodes) / count,
    }
    bits = torch.cat([torch.stack(one.entropies) for one in episodes]).mean(0)
    for dim, value in zip(space.dims, bits.tolist(), strict=True):
        report[f"bits_of_{dim.name}"] = value
    return {name: round(value, 4) for name, value in {**report, **held(episodes)}.items()}


def acceptance(
    target: Any,
    head: Any,
    processor: Any,
    episodes: Sequence[DrivenEpisode],
    recipe: str = "eagle",
    **options: Any,
) -> float:
    """Tokens per round of greedy chains of six drafted tokens, over all moments of episodes."""
    fast = accelerate(target, recipe, drafter=head, processor=processor, length=6, **options)
    tokens = rounds = 0
    for one in episodes:
        for picture in one.pictures:
            asked = processor.instruct(one.instruction, picture)
            stats = fast.generate(**asked, do_sample=False, max_new_tokens=7).stats
            tokens += stats.num_accepted_draft_tokens
            rounds += stats.num_spec_steps
    return round(1 + tokens / max(rounds, 1), 2)


def held(episodes: Sequence[DrivenEpisode], radius: int = 9) -> dict[str, float]:
    """Components that the last action has right from the front, exactly and within `radius` bins.

    The gripper must be right in either case.
    """
    pairs = [torch.stack(one.tokens) for one in episodes if len(one.tokens) > 1]
    off = torch.cat([(one[1:] - one[:-1]).abs() for one in pairs])
    most = torch.full_like(off, radius)
    most[:, -1] = 0
    return {
        "hold_last_accepted": _run(off == 0),
        f"hold_last_accepted_within_{radius}": _run(off <= most),
    }


def _run(right: Tensor) -> float:  # (T, D) bool
    """Mean length of the run of right components that a row begins with."""
    return float(right.long().cumprod(-1).sum(-1).float().mean())
