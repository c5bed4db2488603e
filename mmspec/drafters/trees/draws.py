"""Drawing the children of a node from the drafter's distribution, one function per kind.

Letters: B batch rows, M nodes expanded in one call, V vocabulary. Every function returns the
children in the order they were drawn, which is the order in which verifiers must test them.

A point mass (`distribution.hard`, greedy drafting) needs no noise, and every kind returns its
`count` highest scores: the first child is the argmax, the others are selected by identity.
Verifiers treat a child that its distribution cannot produce as deterministic, so this is exact
under every kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane, Noise, quantile
from mmspec.draft import Kind
from mmspec.targets.tokens.context import Context

MAX_DRAWN = 1 << 23  # random numbers that are drawn at once


def draw(
    distribution: Categorical, count: int, kind: Kind, noise: Noise, position: Tensor, index: Tensor
) -> Tensor:  # (B, M, count) int64
    """Draw `count` children per node from `distribution` (B, M), the drafter's distributions.

    `position` (B, M), or (B, 1) when all nodes share one (a tree level): the absolute position of
    the children; only RACE uses it. `index` (B, M) or (M,) distinguishes all nodes that are
    expanded in one round; the kinds with noise of their own use it.
    """
    if not 1 <= count <= distribution.size:
        raise ValueError(
            f"cannot draw {count} children from a vocabulary of {distribution.size}; "
            "the count must lie between 1 and the vocabulary size"
        )
    if distribution.hard or kind is Kind.DET:
        return top(distribution.scores, count)
    if kind is Kind.RACE:
        return race(distribution, count, noise, position)
    if kind is Kind.WOR:
        return without_replacement(distribution, count, noise, index)
    if kind is Kind.IID:
        return independent(distribution, count, noise, index)
    return hub(distribution, count, noise, index)


def race(distribution: Categorical, count: int, noise: Noise, position: Tensor) -> Tensor:
    """The top of log q + g with the target's own noise g, which agrees with the target most often.

    g belongs to a position, so all nodes of a tree level share it (Gumbel-max coupling, Daliri et
    al. 2025).
    """
    return top(distribution.perturb(noise.shared_keys(position)), count)


def without_replacement(
    distribution: Categorical, count: int, noise: Noise, index: Tensor
) -> Tensor:
    """Gumbel top-k: sequential draws from q without replacement (Kool et al. 2019).

    Where q has fewer than `count` possible tokens, impossible ones fill the rest.
    """
    return top(distribution.perturb(noise.fresh_keys(Lane.DRAFT, index)), count)


def independent(distribution: Categorical, count: int, noise: Noise, index: Tensor) -> Tensor:
    """Independent draws from q by its inverse distribution function; duplicates are possible."""
    return quantile(distribution.probs, noise.fresh_keys(Lane.DRAFT, index).uniform(count))


def hub(distribution: Categorical, count: int, noise: Noise, index: Tensor) -> Tensor:
    """The top `count - 1` tokens of q, then one draw from the rest of q (Hu et al. 2025)."""
    return _hub(distribution, count, noise.fresh_keys(Lane.DRAFT, index).gumbel(distribution.size))


def _hub(distribution: Categorical, count: int, gumbel: Tensor) -> Tensor:
    if count == 1:
        return top(distribution.scores + gumbel, 1)
    taken = top(distribution.scores, count - 1)
    # impossible tokens rank below all possible ones and above the tokens already taken
    least = torch.finfo(distribution.scores.dtype).min
    rest = distribution.scores.clamp_min(least).scatter(-1, taken, -torch.inf)
    return torch.cat([taken, top(rest + gumbel, 1)], -1)


def top_of_all(scores: Tensor, count: int) -> Tensor:  # (B, n, V) -> (B, n * count)
    """The highest scores of every node, node by node."""
    return scores.argmax(-1) if count == 1 else scores.topk(count, -1).indices.flatten(1)


def top(scores: Tensor, count: int) -> Tensor:  # (..., V) -> (..., count)
    """The highest scores first."""
    if count == 1:  # argmax breaks ties as the target does
        return scores.argmax(-1, keepdim=True)
    return scores.topk(count, -1).indices


def ranking(
    distribution: Categorical, kind: Kind, noise: Noise, position: Tensor
) -> Tensor:  # (B, n, V)
    """Log-probabilities that rank candidates, with the target's noise for RACE proposals."""
    if kind is Kind.RACE and not distribution.hard:
        return distribution.perturb(noise.shared_keys(position)).log_softmax(-1)
    return distribution.scores.log_softmax(-1)


def draw_fresh_noise(
    distribution: Categorical, kind: Kind, context: Context, count: int, width: int
) -> Tensor | None:  # (B, count, V), or (B, count, width)
    """The noise of `count` nodes of up to `width` children, where it is not too much at once.

    None for proposals that take no noise of their own.
    """
    is_large = context.batch * count * distribution.size > MAX_DRAWN
    if distribution.hard or is_large:
        return None
    if kind in (Kind.WOR, Kind.HUB):
        return context.noise.fresh_gumbel(Lane.DRAFT, count, distribution.size)
    return context.noise.fresh_uniform(Lane.DRAFT, count, width) if kind is Kind.IID else None


def draw_level(
    distribution: Categorical, count: int, kind: Kind, noise: Tensor
) -> Tensor:  # (B, n * count)
    """`draw` for nodes with their part of `draw_fresh_noise`: all children, node by node."""
    if kind is Kind.WOR:
        return top_of_all(distribution.scores + noise, count)
    if kind is Kind.HUB:
        return _hub(distribution, count, noise).flatten(1)
    own = noise if noise.shape[-1] == count else noise[..., :count]
    return quantile(distribution.probs, own).flatten(1)


def draw_noise(
    distribution: Categorical, kind: Kind, context: Context, depth: int
) -> Sequence[Tensor] | None:  # (B, 1, V) each
    """The target's noise of `depth` levels below the context, for RACE proposals."""
    if kind is not Kind.RACE or distribution.hard:
        return None
    noise = context.noise.position_gumbel(context.lengths, depth, distribution.size)
    levels: Sequence[Tensor] = noise.split(1, 1)
    return levels


def perturb_level(
    distribution: Categorical, noise: Sequence[Tensor] | None, level: int
) -> Tensor:  # (B, n, V)
    """Scores of nodes that share a level, plus its part of `draw_noise`."""
    return distribution.scores if noise is None else distribution.scores + noise[level]


def race_level(
    distribution: Categorical, count: int, noise: Sequence[Tensor], level: int
) -> Tensor:
    """`race` for nodes that share a level: all children (B, n * count)."""
    return top_of_all(perturb_level(distribution, noise, level), count)
