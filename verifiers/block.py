"""Block verification: accept the longest prefix that passes as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import as_categorical, normalise
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.walk import check_draft, gather_token, proposals, verify_empty


@dataclass(frozen=True)
class Block(Verifier):
    """Block verification of a chain (Algorithm 2, Sun et al. 2024), lossless, never below `Exact`.

    With rho_i = min(1, rho_{i-1} p/q), position i passes with h_i = Z_i / (Z_i + 1 - rho_i),
    Z_i = sum (rho_i p_i - q_i)+, and the last with rho_gamma. The *largest* passing i is accepted
    and the correction comes from norm((rho_i p_i - q_i)+). For one token it is `Exact`;
    deterministic proposals gain nothing.
    """

    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    looks_ahead: ClassVar[bool] = True  # acceptance depends on later tokens
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID, Kind.WOR, Kind.DET)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        check_draft(self, draft, trees=False)
        if not draft.nodes:
            return verify_empty(scores, noise)
        p = as_categorical(scores.distribution).probs
        q = proposals(draft, p).probs
        index = torch.arange(1, draft.nodes + 1, device=p.device)
        batch = torch.arange(draft.batch, device=p.device)
        rho = path_ratio(
            gather_token(p[:, :-1], draft.tokens), gather_token(q, draft.tokens)
        )  # 0 .. gamma
        passing = _passing(rho, p, q)
        gamma = draft.mask.sum(-1)
        passing = torch.where(index == gamma[:, None], rho[:, 1:], passing)
        hits = noise.flip(torch.where(draft.mask, passing, 0), Lane.ACCEPT)
        length = (hits * index).amax(-1)
        end, scale = p[batch, length], rho[batch, length]
        left = scaled_residual(end, q[batch, length.clamp_max(draft.nodes - 1)], scale)
        weights = torch.where((length < gamma)[:, None], left, end)
        path = torch.where(index <= length[:, None], index - 1, -1)
        return Verdict(path, length, noise.pick(weights, Lane.RESIDUAL))


def path_ratio(p: Tensor, q: Tensor) -> Tensor:  # (B, N) x2 -> (B, N + 1)
    """rho: the ratio of path probabilities, capped at 1 in every step."""
    return cap_path_ratio(p.log() - q.log())


def cap_path_ratio(log_ratio: Tensor) -> Tensor:  # (B, N) -> (B, N + 1)
    """w_0 = 1 and w_i = min(1, w_{i-1} exp(log_ratio_i))."""
    total = log_ratio.cumsum(-1)
    rho = (total - total.cummax(-1).values.clamp_min(0)).exp()
    return torch.cat([torch.ones_like(rho[:, :1]), rho], -1)


def stopping_probability(left: Tensor, rho: Tensor) -> Tensor:  # (...) x2 -> (...)
    """h = Z / (Z + 1 - rho), and 1 where the denominator is 0."""
    whole = left + 1 - rho
    return torch.where(whole > 0, left / whole.clamp_min(torch.finfo(whole.dtype).tiny), 1)


def scaled_residual(p: Tensor, q: Tensor, rho: Tensor) -> Tensor:  # (..., V) x2, (...)
    """norm((rho p - q)+), or p where that is nowhere positive."""
    return normalise((rho[..., None] * p - q).clamp_min(0), p)


def _passing(rho: Tensor, p: Tensor, q: Tensor) -> Tensor:  # -> (B, N)
    """h_1 .. h_{N-1} of positions followed by another node, and rho_N."""
    left = (rho[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp_min(0).sum(-1)
    return torch.cat([stopping_probability(left, rho[:, 1:-1]), rho[:, -1:]], -1)
