"""Fuzzy speculative decoding: accept any token where target and drafter are alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.errors import check_number
from mmspec.verifiers.cascade import soften
from mmspec.verifiers.distances import total_variation

Divergence = Callable[[Tensor, Tensor], Tensor]  # p, q (..., V) -> (...)


def kullback_leibler(p: Tensor, q: Tensor) -> Tensor:
    """KL(q || p) in nats, the direction of the authors' code; infinite where p = 0 < q."""
    found: Tensor = (torch.special.xlogy(q, q) - torch.special.xlogy(q, p)).sum(-1)
    return found


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Half of KL(p || m) + KL(q || m), m = (p + q) / 2, in nats: at most log 2."""
    middle = (p + q) / 2
    return (kullback_leibler(middle, p) + kullback_leibler(middle, q)) / 2


DIVERGENCES: Mapping[str, Divergence] = {
    "js": jensen_shannon,
    "kl": kullback_leibler,
    "tv": total_variation,
}


@dataclass(frozen=True)
class Fuzzy:
    """Accept where the divergence of p and q is at most `threshold` (FSD, Holsman et al. 2025).

    The decision belongs to the position, not to the token. Corrections come from p itself, as in
    the authors' code, so a token has the distribution q where the position is accepted and p
    elsewhere: a bias of TV(p, q) or 0, and TV(p, q) <= sqrt(2 JS). Thresholds of one divergence
    mean nothing for another. Greedy decoding compares the distributions of sampling. Lossy; below 0
    nothing is accepted. A deterministic proposal is compared as a point mass.

    Raises ValueError for a threshold that is NaN, and for an unknown divergence.
    """

    threshold: float = 0.4
    divergence: str = "js"  # one of `DIVERGENCES`
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(
                f"divergence={self.divergence!r} is not known; choose one of "
                f"{', '.join(DIVERGENCES)}"
            )
        if self.threshold != float("inf"):
            check_number("threshold", self.threshold, example=0.4)

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        return self._is_near(p, q).to(p.probs)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p

    def bias(self, p: Categorical, q: Categorical) -> Tensor:  # (...)
        return self._is_near(p, q) * total_variation(p.probs, q.probs)

    def _is_near(self, p: Categorical, q: Categorical) -> Tensor:  # (...) bool
        return DIVERGENCES[self.divergence](soften(p), soften(q)) <= self.threshold
