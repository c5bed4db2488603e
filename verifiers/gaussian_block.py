"""Block verification of Gaussian steps: accept the longest run of states that stands as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers import gaussian_line
from mmspec.verifiers.block import capped, stopping
from mmspec.verifiers.gaussian_steps import Steps, chain, fit, line, own, plain, residual, steps


@dataclass(frozen=True)
class GaussianBlock(Verifier):
    """Block verification of a chain of Gaussian steps, lossless, never below `Reflection`.

    Reconstructed: Algorithm 2 of Sun et al. (2024) with densities for probabilities; block
    verification for diffusion is known from the abstract of Soen et al. (2026) alone. With
    w_i = min(1, w_{i-1} p(x_i) / q(x_i)), run i passes with

        h_i = Z_i / (Z_i + 1 - w_i),   Z_i = the mass of (w_i p_{i+1} - q_{i+1})+,

    and the whole chain with w_N. The *longest* passing run is kept and the next state comes from
    norm((w p - q)+): both differ along a line only, where Z and the draw have a closed form.

    Run i ends the draft with probability (1 - w_{i+1}) h_i given what leads up to x_{i+1}, so S is
    all it says about the noise of x_{i+1}, whose orthogonal part is kept. But it does say something
    about the noise behind x_{i+1}: the draft must be driven by the noise of its round (Kind.IID,
    `noise.fresh`), not by the noise of a position, which later rounds would use again.

    Raises ValueError for trees, for states without their `Driving` or driven by shared noise, and
    where target and draft differ in their standard deviation.
    """

    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return plain(draft, scores, noise)
        step = steps(self, draft, scores)
        _refuse_shared(step, draft, scores, noise)
        r, place = line(step)
        w = capped(r * (place - r / 2))
        gamma = draft.mask.sum(-1)
        index = torch.arange(1, draft.nodes + 1, device=w.device)
        passing = torch.cat(
            [stopping(gaussian_line.excess(r[:, 1:], w[:, 1:-1]), w[:, 1:-1]), w[:, -1:]], -1
        )
        passing = torch.where(index == gamma[:, None], w[:, 1:], passing)
        hits = noise.flip(torch.where(draft.mask, passing, 0), Lane.ACCEPT)
        length = longest_run(hits, index)
        rows = torch.arange(draft.batch, device=w.device)
        uniform = noise.fresh(Lane.RESIDUAL, torch.zeros_like(length[:1])).uniform()[:, 0]
        left = residual(step.at(length.clamp_max(draft.nodes - 1)), w[rows, length], uniform)
        full = fit(length == gamma, left) > 0
        return chain(draft, length, torch.where(full, own(scores, length, noise), left))


def longest_run(hits: Tensor, index: Tensor) -> Tensor:  # (B, N), (N,) counted from 1 -> (B,)
    """The largest index that passes, whether or not those before it do."""
    return (hits * index).amax(-1)


def _refuse_shared(step: Steps, draft: Draft, scores: Scores, noise: Noise) -> None:
    """Compare the first number of every state's noise with that of its position."""
    shared = noise.shared(scores.position[:, :-1]).normal(1)[..., 0]
    if bool(((step.noise.flatten(2)[..., 0] == shared) & draft.mask).any()):
        raise ValueError(
            "GaussianBlock looks ahead, so noise that later rounds use again would bias it; drive "
            "the draft with context.noise.fresh(Lane.DRAFT, position)"
        )
