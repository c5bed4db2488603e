"""Chains of which a part is known: inpainting by pasting the picture into the latents of each step.

Behind every step such a pipeline puts the noised picture wherever its mask keeps it. What is left
free is a Gaussian chain of its own, and the rest a table over the steps:

    state      [ free | known ]  step 0, as the pipeline drew it
    network    sees both, and its prediction of the free part moves that part on
    pasted     known[1], known[2], ...   whatever the network says
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.declared import answered_by
from mmspec.targets.continuous.denoising import Denoiser, Prediction


class Pasting:
    """Finds out what a pipeline pastes into its latents, in two rehearsals.

    Their states are random, and each other's strangers: a place that kept them both times in all
    steps is free, one that held the same number both times is known, and a pipeline with any
    other place (a soft mask) changes its latents by what they are, and is refused.
    """

    def __init__(self) -> None:
        self.free: Tensor | None = None  # (B, *E) bool; None as long as nothing was pasted
        self.runs: list[list[Tensor]] = []  # the states of steps 1, 2, ... of every rehearsal

    def begin(self) -> None:
        """A rehearsal begins."""
        self.runs.append([])

    def add(self, given: Tensor, found: Tensor) -> None:  # (B, *E) x2
        """The state that the pipeline was given last, and what it goes on with."""
        kept = given == found
        if self.free is None and bool(kept.all()):
            return
        if self.free is None:
            self.free = kept
        self.free = self.free & kept
        self.runs[-1].append(found.float())

    def is_sure(self, steps: int) -> bool:
        """Whether nothing is pasted, or two rehearsals of so many steps agree about it.

        Raises ValueError where they do not.
        """
        if self.free is None:
            return True
        if any(len(run) != steps - 1 for run in self.runs):
            raise _changing("in some steps only")
        if len(self.runs) < 2:
            return False
        pairs = zip(*self.runs, strict=True)
        if any(not torch.equal(a[~self.free], b[~self.free]) for a, b in pairs):
            raise _changing("by what they are")
        if not bool((self.free == self.free[:1]).all()) or not bool(self.free.any()):
            raise ValueError(
                "the masks of these pictures differ, or leave nothing free; give one mask for all, "
                "or one call for each"
            )
        return True

    def known(self, start: Tensor) -> tuple[Tensor, Tensor]:  # (B, *E) -> (M,), (N, B, prod E)
        """The places that are free, and the states of all steps."""
        assert self.free is not None
        states = torch.stack((start, *self.runs[-1])).flatten(2)
        return self.free[0].flatten().nonzero().squeeze(1), states


def _changing(how: str) -> ValueError:
    return ValueError(
        f"this pipeline changes its latents between steps, {how}, which cannot be done in parallel;"
        " use it without a soft mask, or with the recipes speca and taylorseer"
    )


@dataclass(frozen=True)
class PartialDenoiser:
    """The free part of a chain: states are (R, M), the free numbers of `inner`'s (R, *E)."""

    inner: Denoiser
    shape: torch.Size  # E
    free: Tensor  # (M,) places in the flattened E
    known: Tensor  # (N, B, prod E), of which the free ones do not count

    kernel = answered_by("inner.kernel")
    width = answered_by("inner.width")

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        seen = self.inner.predict(self.whole(states, step, row), step, row)
        std = None if seen.std is None else seen.std.flatten(1)[:, self.free]
        return Prediction(seen.clean.flatten(1)[:, self.free], std)

    def whole(self, states: Tensor, step: Tensor, row: Tensor) -> Tensor:  # (R, M) -> (R, *E)
        """The states with what is known around them."""
        full = self.known[step, row].index_copy(1, self.free, states)
        return full.reshape(-1, *self.shape)
