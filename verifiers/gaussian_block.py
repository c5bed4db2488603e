"""Block verification of Gaussian steps: accept the longest run that passes as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.verifiers.block import cap_path_ratio, stopping_probability
from mmspec.verifiers.gaussian_steps import (
    GaussianSteps,
    accept_chain,
    align_steps,
    expand_event,
    line_excess,
    project_on_line,
    residual,
    sample_target,
    verify_empty,
)


@dataclass(frozen=True)
class GaussianBlock(Verifier):
    """Block verification of a chain of Gaussian steps, lossless, never below `Reflection`.

    Reconstructed: Algorithm 2 of Sun et al. (2024) with densities in place of probabilities; of
    Soen et al. (2026), block verification for diffusion, only the abstract is known. With w_i =
    min(1, w_{i-1} p(x_i) / q(x_i)), run i passes with

        h_i = Z_i / (Z_i + 1 - w_i),   Z_i = the mass of (w_i p_{i+1} - q_{i+1})+,

    and the whole chain with w_N. The *longest* passing run is accepted and the next state comes
    from norm((w p - q)+). p and q differ along a line only, where Z and the sample have a closed
    form.

    Run i ends the draft with probability (1 - w_{i+1}) h_i given the states up to x_{i+1}. This
    depends on the noise of x_{i+1} through S only, so its orthogonal part is reused, but it also
    depends on the noise of later states. The draft must therefore use the noise of its round
    (Kind.IID, `noise.fresh_keys`), not that of a position, which later rounds would reuse.

    Raises ValueError for trees, for states without their `DrivingNoise` or with shared noise, and
    where target and draft differ in their standard deviation.
    """

    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    decodes: ClassVar[tuple[str, ...]] = ("latents", "patches")
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return verify_empty(draft, scores, noise)
        step = align_steps(self, draft, scores)
        _check_fresh_noise(step, draft, scores, noise)
        r, coordinate = project_on_line(step)
        w = cap_path_ratio(r * (coordinate - r / 2))
        gamma = draft.mask.sum(-1)
        index = torch.arange(1, draft.nodes + 1, device=w.device)
        passing = torch.cat(
            [stopping_probability(line_excess(r[:, 1:], w[:, 1:-1]), w[:, 1:-1]), w[:, -1:]], -1
        )
        passing = torch.where(index == gamma[:, None], w[:, 1:], passing)
        hits = noise.flip(torch.where(draft.mask, passing, 0), Lane.ACCEPT)
        length = longest_run(hits, index)
        rows = torch.arange(draft.batch, device=w.device)
        uniform = noise.fresh_keys(Lane.RESIDUAL, torch.zeros_like(length[:1])).uniform()[:, 0]
        left = residual(step.at(length.clamp_max(draft.nodes - 1)), w[rows, length], uniform)
        full = expand_event(length == gamma, left) > 0
        return accept_chain(
            draft, length, torch.where(full, sample_target(scores, length, noise), left)
        )


def longest_run(hits: Tensor, index: Tensor) -> Tensor:  # (B, N), (N,) counted from 1 -> (B,)
    """The largest index that passes, whether or not those before it do."""
    return (hits * index).amax(-1)


def _check_fresh_noise(step: GaussianSteps, draft: Draft, scores: Scores, noise: Noise) -> None:
    """Compare the first number of the noise of every state with that of its position."""
    shared = noise.shared_keys(scores.position[:, :-1]).normal(1)[..., 0]
    if bool(((step.noise.flatten(2)[..., 0] == shared) & draft.mask).any()):
        raise ValueError(
            "GaussianBlock looks ahead, so noise that later rounds use again would bias it; draw "
            "the draft with context.noise.fresh_keys(Lane.DRAFT, position)"
        )
