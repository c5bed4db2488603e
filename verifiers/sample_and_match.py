"""Sample the target's token, and continue while some child equals it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.walk import Siblings, check_draft, descend, one_hot


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
        return descend(draft, scores, noise, match)


def match(family: Siblings, noise: Noise, lane: int) -> tuple[Tensor, Tensor]:
    """One level: the slot of the child that equals the target's token, and a point mass on it."""
    token = noise.pick(family.p.probs, lane)
    return find_child(family, token), one_hot(token, family.p.probs)


def find_child(family: Siblings, token: Tensor) -> Tensor:  # (B,) -> (B,)
    """The first child equal to `token`, or -1."""
    same = family.real & (family.tokens == token[:, None])
    return torch.where(same.any(-1), same.int().argmax(-1), -1)
