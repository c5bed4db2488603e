"""What is drawn after LANTERN rejects a token: the optimum, and what its released code does.

LANTERN (Jang et al. 2025) and LANTERN++ (Park et al. 2025) ship several corrections, none of them
the one with the least distance. `Optimal` is the default; `ClearedTarget` serves reproduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical, normalised


@dataclass(frozen=True)
class Pool:
    """The neighbours of a tested token."""

    tokens: Tensor  # (..., k + 1) nearest first; (..., k) where the codebook has no more
    real: Tensor  # (..., 1) bool, False = the token is no image code and has no neighbours
    size: Tensor  # (...) how many of the first k were pooled
    mass: Tensor  # (...) their probability under p


class ResidualRule(Protocol):
    """Where the next token, or the next sibling's test, gets its distribution from.

    `pool` finds the neighbours of x, for those who ask.
    """

    def __call__(
        self, p: Categorical, q: Categorical, x: Tensor, pool: Callable[[], Pool]
    ) -> Categorical: ...  # distributions (...) x2, (...) -> distribution (...)


@dataclass(frozen=True)
class Optimal:
    """norm((p - q)+): the least distance for any relaxed acceptance (Cool-SD, Li et al. 2026)."""

    def __call__(
        self, p: Categorical, q: Categorical, x: Tensor, pool: Callable[[], Pool]
    ) -> Categorical:
        return p.residual(q)


@dataclass(frozen=True)
class ClearedTarget:
    """norm((p' - q)+), p' without the neighbours of x.

    As released for dynamic trees of LlamaGen and Anole, where q is a point mass, and for every tree
    of Lumina-mGPT. All k neighbours go, and one more, whenever one could be pooled. Falls back to p
    where nothing is left; the released code to a uniform distribution over the whole vocabulary.
    """

    def __call__(
        self, p: Categorical, q: Categorical, x: Tensor, pool: Callable[[], Pool]
    ) -> Categorical:
        left = (_cleared(p.probs, pool()) - q.probs).clamp_min(0)
        return Categorical.having(normalised(left, p.probs))


def _cleared(distribution: Tensor, pool: Pool) -> Tensor:  # (..., V) -> (..., V)
    """`distribution` without the neighbours, where at least one was pooled."""
    goes = (pool.real & (pool.size > 0)[..., None]).expand_as(pool.tokens)
    kept = torch.where(goes, 0, distribution.gather(-1, pool.tokens))
    return distribution.scatter(-1, pool.tokens, kept)
