"""Multi-draw tolerance: the target is sampled a few times, and children may match any draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier, categorical
from mmspec.verifiers.walk import STRIDE, check, depth_of, longest, nothing


@dataclass(frozen=True)
class MultiDraw(Verifier):
    """Draw `draws` tokens of p at a node, follow all children among them (VADUSA, Li et al. 2024).

    The deepest path wins, ties go to the higher log p; where no child was drawn, the first draw is
    the next token. A single child c comes out with 1 - (1 - p(c))^n and any other token z with
    p(z) (1 - p(c))^(n - 1), which is (1 - p(c)) - (1 - p(c))^n away from p. `draws=1` is
    `SampleAndMatch`, exact for every draft; more are lossy but for a point mass p, which every draw
    repeats. Of duplicate siblings the first is followed. Reconstructed: how ties are broken, and
    the token that follows a miss.

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
        check(self, draft, distribution=False)
        if not draft.nodes:
            return nothing(scores, noise)
        distribution = categorical(scores.distribution).evaluated()
        batch = torch.arange(draft.batch, device=draft.tokens.device)
        passed, first = self._walk(draft, distribution, noise)
        above = draft.parents + 1
        likely = distribution[batch[:, None], above].prob(draft.tokens)
        tie = likely.clamp_min(torch.finfo(likely.dtype).tiny).log()
        path, length, row = longest(draft, passed, tie)
        return Verdict(path, length, first[batch, row])

    def _walk(self, draft: Draft, distribution: Categorical, noise: Noise) -> tuple[Tensor, Tensor]:
        """The nodes (B, N) reached through drawn tokens, and the first draw after each row."""
        batch = torch.arange(draft.batch, device=draft.tokens.device)
        depths, deep = draft.depths(), depth_of(draft)
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
                node, found = _matching(draft, at, drawn)
                passed = passed.scatter_add(1, node, (found & live[:, None]).to(passed))
            here = (passed > 0) & (depths == depth)
            widest = self.draws ** (depth + 1)  # as many nodes may be reached at a depth
            order = here.int().argsort(dim=-1, descending=True, stable=True)[:, :widest]
            reached, open_ = order + 1, here.gather(1, order)
        return passed > 0, first


def _matching(draft: Draft, at: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The children (B, C) of row `at` (B,), and which of them, duplicates aside, are in `drawn`."""
    child = draft.children()[torch.arange(draft.batch, device=at.device), at]
    node = child.clamp_min(0)
    real = (child >= 0) & draft.mask.gather(1, node)
    same = (draft.tokens.gather(1, node)[:, None] == drawn[:, :, None]) & real[:, None]
    return node, (same & (same.cumsum(-1) == 1)).any(1)
