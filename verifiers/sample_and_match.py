"""Sample the target's token, and continue while some child equals it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.branches import Branches, verify_branches
from mmspec.verifiers.walk import check_draft, verify_greedy


@dataclass(frozen=True)
class SampleAndMatch(Verifier):
    """Sample from p at each node, follow the child that matches (SpecExec; REST, He et al. 2024).

    Lossless for every kind, since the sample does not depend on the draft; accepts the sum of p
    over the distinct children, as the delta rule of EAGLE-2 does. `Recursive` accepts more of IID
    and WOR proposals; `Coupled` is this verifier with the noise of positions. Of duplicate siblings
    the first is followed.
    """

    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET, Kind.WOR, Kind.IID, Kind.HUB, Kind.RACE)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, distribution=False)
        return verify_greedy(draft, scores) or verify_branches(draft, scores, noise, match)


def match(branches: Branches) -> tuple[Tensor, Tensor]:
    """Each distinct child is the target's sample with its probability p(x)."""
    x, p = branches.tokens, branches.p
    return match_children(p, x, branches.real, torch.ones_like(p[..., :1]))


def match_children(
    weights: Tensor, x: Tensor, real: Tensor | None, chance: Tensor
) -> tuple[Tensor, Tensor]:
    """Children x (B, M, C) that equal a sample of `weights` (B, M, V), which exists with `chance`.

    Returns the probability that none so far does, and the weights without the children.
    """
    found = weights.gather(-1, x)
    if real is not None:
        found = found * real
    if x.shape[-1] > 1:
        same = (x[..., :, None] == x[..., None, :]).tril(-1)
        if real is not None:
            same = same & real[..., None, :]
        found = found * ~same.any(-1)
    removed = found * 0 if real is None else torch.where(real, 0, weights.gather(-1, x))
    rest = weights.scatter_reduce(-1, x, removed, "amin")
    later = found.flip(-1).cumsum(-1).flip(-1) - found  # of the children after each
    return chance * (rest.sum(-1, keepdim=True) + later), rest
