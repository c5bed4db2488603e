"""Measure a policy: success on held-out goals, entropies, and agreement with its last action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.codes.actions import ActionSpace
from mmspec.modalities.vla.quality import wilson
from tools.zoo.vla.episodes import PolicyEpisode


def figures(episodes: Sequence[PolicyEpisode], space: ActionSpace) -> dict[str, float]:
    """Success with its 95 % interval, steps, entropies (bits), and `hold_last_figures`."""
    count, successes = len(episodes), sum(one.is_success for one in episodes)
    low, high = wilson(successes, count)
    report = {
        "episodes": count,
        "success": successes / count,
        "success_from": low,
        "success_to": high,
        "steps_per_episode": sum(len(one.tokens) for one in episodes) / count,
    }
    bits = torch.cat([torch.stack(one.entropies) for one in episodes]).mean(0)
    for dim, value in zip(space.dims, bits.tolist(), strict=True):
        report[f"bits_of_{dim.name}"] = value
    return {
        name: round(value, 4) for name, value in {**report, **hold_last_figures(episodes)}.items()
    }


def acceptance(
    target: Any,
    head: Any,
    processor: Any,
    episodes: Sequence[PolicyEpisode],
    recipe: str = "eagle",
    **options: Any,
) -> float:
    """Tokens per round of greedy chains of six drafted tokens, over all steps of episodes."""
    fast = accelerate(target, recipe, drafter=head, processor=processor, length=6, **options)
    tokens = rounds = 0
    for one in episodes:
        for picture in one.pictures:
            inputs = processor.instruct(one.instruction, picture)
            stats = fast.generate(**inputs, do_sample=False, max_new_tokens=7).stats
            tokens += stats.num_accepted_draft_tokens
            rounds += stats.num_spec_steps
    return round(1 + tokens / max(rounds, 1), 2)


def hold_last_figures(episodes: Sequence[PolicyEpisode], radius: int = 9) -> dict[str, float]:
    """Mean prefix length in which an action equals the last one, exactly and within `radius` bins.

    The gripper must be equal in either case.
    """
    pairs = [torch.stack(one.tokens) for one in episodes if len(one.tokens) > 1]
    off = torch.cat([(one[1:] - one[:-1]).abs() for one in pairs])
    tolerance = torch.full_like(off, radius)
    tolerance[:, -1] = 0
    return {
        "hold_last_accepted": _mean_run(off == 0),
        f"hold_last_accepted_within_{radius}": _mean_run(off <= tolerance),
    }


def _mean_run(is_equal: Tensor) -> float:  # (T, D) bool
    """Mean length of the leading run of equal components."""
    return float(is_equal.long().cumprod(-1).sum(-1).float().mean())
