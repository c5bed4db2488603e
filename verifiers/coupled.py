"""Coupled sampling: accept the token that the target samples with the noise of the position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions import Distribution
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.walk import check_draft, find_longest_path


@dataclass(frozen=True)
class Coupled(Verifier):
    """Accept tokens equal to the target's (Gumbel-max coupling; Daliri et al. 2025).

    The target's token after a node is a function of (seed, row, position) and its distribution, so
    the output is that of plain decoding with the same seed, token for token, for any draft:
    lossless for every kind, every tree, categorical and continuous tokens. Point masses use no
    noise: greedy decoding. RACE proposals use the same noise and agree with probability sum_x 1 /
    sum_z max(p_z/p_x, q_z/q_x). Of duplicate siblings the one with the longest accepted path is
    taken.
    """

    lossless: ClassVar[bool] = True
    couples: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET, Kind.IID, Kind.WOR, Kind.HUB)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False)
        own = target_tokens(draft, scores, noise)
        if draft.is_chain or not draft.nodes:
            hits = _equal(own[:, :-1], draft.tokens)
            accepted = (hits & draft.mask if draft.padded else hits).cumprod(-1)
            length = row = accepted.sum(-1)
            path = accepted * _count_from_one(draft.nodes, accepted.device) - 1
        else:
            parent = draft.parents + 1
            rows = torch.arange(draft.batch, device=parent.device)[:, None]
            path, length, row = find_longest_path(draft, _equal(own[rows, parent], draft.tokens))
        if own.dim() == 2:
            return Verdict(path, length, own.gather(1, row[:, None])[:, 0])
        return Verdict(path, length, own[torch.arange(draft.batch, device=row.device), row])


def target_tokens(draft: Draft, scores: Scores, noise: Noise) -> Tensor:  # (B, N + 1, *E)
    """The target's token after the context and after every node."""
    distribution: Distribution = scores.distribution
    if isinstance(distribution, Categorical):
        if distribution.hard:
            return distribution.scores.argmax(-1)
        if draft.tree is not None and not draft.is_chain:  # noise per depth, not per node
            first, level = _levels(draft.tree.depths, distribution.scores.device)
            gumbel = noise.shared_keys(scores.position[:, first]).gumbel(distribution.size)
            return (distribution.scores + gumbel[:, level]).argmax(-1)
    return distribution.sample(noise.shared_keys(scores.position))


def _equal(left: Tensor, right: Tensor) -> Tensor:  # (B, N, *E) x2 -> (B, N)
    same = left == right
    return same if same.dim() == 2 else same.flatten(2).all(-1)


@lru_cache(maxsize=64)
def _count_from_one(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device)


@lru_cache(maxsize=64)
def _levels(depths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The first row of `scores` at each level, and the level of each row."""
    level = [0] + [depth + 1 for depth in depths]
    first = [level.index(value) for value in range(max(level) + 1)]
    return torch.tensor(first, device=device), torch.tensor(level, device=device)
