"""Multi-draw tolerance: sample the target several times, accept children that match any sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.walk import STRIDE, check_draft, draft_depth, find_longest_path, verify_empty


@dataclass(frozen=True)
class MultiDraw(Verifier):
    """Sample `draws` tokens at a node and follow all children among them (VADUSA, Li et al. 2024).

    The deepest path is accepted, ties go to the higher log p; where no child matches, the first
    sample is the next token. A single child c has probability 1 - (1 - p(c))^n and any other token
    z has p(z) (1 - p(c))^(n - 1), a distance of (1 - p(c)) - (1 - p(c))^n from p. `draws=1` is
    `SampleAndMatch`, exact for every draft; more are lossy except for a point mass p. Of duplicate
    siblings the first is followed. Reconstructed: the order of ties, and the token that follows a
    miss.

    Raises ValueError for fewer than one draw.
    """

    draws: int = 1
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET, Kind.WOR, Kind.IID, Kind.HUB, Kind.RACE)

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise ValueError(f"draws={self.draws}; draw the target once, which is exact, or more")

    @property
    def lossless(self) -> bool:
        return self.draws == 1

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False)
        if not draft.nodes:
            return verify_empty(scores, noise)
        distribution = as_categorical(scores.distribution).evaluate()
        batch = torch.arange(draft.batch, device=draft.tokens.device)
        passed, first = self._walk(draft, distribution, noise)
        above = draft.parents + 1
        likely = distribution[batch[:, None], above].prob(draft.tokens)
        tie = likely.clamp_min(torch.finfo(likely.dtype).tiny).log()
        path, length, row = find_longest_path(draft, passed, tie)
        return Verdict(path, length, first[batch, row])

    def _walk(self, draft: Draft, distribution: Categorical, noise: Noise) -> tuple[Tensor, Tensor]:
        """The nodes (B, N) reached through sampled tokens, and the first sample after each row."""
        batch = torch.arange(draft.batch, device=draft.tokens.device)
        depths, deep = draft.depths(), draft_depth(draft)
        passed = torch.zeros_like(draft.tokens)
        first = torch.zeros_like(draft.children()[:, :, 0])
        reached = torch.zeros_like(first[:, :1])
        open_ = torch.ones_like(reached, dtype=torch.bool)
        for depth in range(deep + 1):
            count = self.draws if depth < deep else 1  # below the leaves nothing can match
            for column, (at, live) in enumerate(zip(reached.T, open_.T, strict=True)):
                lane = Lane.WALK + STRIDE * depth + column * self.draws
                weights = distribution[batch, at].probs
                drawn = torch.stack([noise.pick(weights, lane + j) for j in range(count)], 1)
                first[batch, at] = torch.where(live, drawn[:, 0], first[batch, at])
                node, found = _match_children(draft, at, drawn)
                passed = passed.scatter_add(1, node, (found & live[:, None]).to(passed))
            here = (passed > 0) & (depths == depth)
            widest = self.draws ** (depth + 1)  # as many nodes may be reached at a depth
            order = here.int().argsort(dim=-1, descending=True, stable=True)[:, :widest]
            reached, open_ = order + 1, here.gather(1, order)
        return passed > 0, first


def _match_children(draft: Draft, at: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The children (B, C) of row `at` (B,), and which are in `drawn`, without duplicates."""
    child = draft.children()[torch.arange(draft.batch, device=at.device), at]
    node = child.clamp_min(0)
    real = (child >= 0) & draft.mask.gather(1, node)
    same = (draft.tokens.gather(1, node)[:, None] == drawn[:, :, None]) & real[:, None]
    return node, (same & (same.cumsum(-1) == 1)).any(1)
