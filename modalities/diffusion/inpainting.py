"""Chains with a known part: inpainting pipelines that overwrite latents after each step.

After every step such a pipeline sets the latents outside the mask to the noised image. The free
part is a Gaussian chain, and the known part is a table over the steps:

    state      [ free | known ]  step 0, from the pipeline
    network    reads both, and its prediction of the free part advances that part
    known      known[1], known[2], ...   independent of the network
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec._attributes import delegate_to
from mmspec.targets.continuous.denoising import Denoiser, Prediction


class InpaintingDetector:
    """Detects the latents that a pipeline overwrites, from two traced runs.

    The states of both runs are random and independent. An element that is unchanged in all steps of
    both runs is free, an element with the same value in both runs is known. Any other element (a
    soft mask) depends on the latents, and the pipeline is refused.
    """

    def __init__(self) -> None:
        self.free: Tensor | None = None  # (B, *E) bool; None if nothing was overwritten
        self.runs: list[list[Tensor]] = []  # the states of steps 1, 2, ... of every run

    def begin_run(self) -> None:
        """Begin a traced run."""
        self.runs.append([])

    def add(self, given: Tensor, found: Tensor) -> None:  # (B, *E) x2
        """Add the state passed to the pipeline, and the state of its next step."""
        is_equal = given == found
        if self.free is None and bool(is_equal.all()):
            return
        if self.free is None:
            self.free = is_equal
        self.free = self.free & is_equal
        self.runs[-1].append(found.float())

    def is_sure(self, steps: int) -> bool:
        """Whether nothing is overwritten, or two runs of `steps` steps agree on the known part.

        Raises ValueError if they disagree.
        """
        if self.free is None:
            return True
        if any(len(run) != steps - 1 for run in self.runs):
            raise _unsupported_change("in some steps only")
        if len(self.runs) < 2:
            return False
        pairs = zip(*self.runs, strict=True)
        if any(not torch.equal(a[~self.free], b[~self.free]) for a, b in pairs):
            raise _unsupported_change("depending on their values")
        if not bool((self.free == self.free[:1]).all()) or not bool(self.free.any()):
            raise ValueError(
                "the masks of these pictures differ, or leave nothing free; give one mask for all, "
                "or one call for each"
            )
        return True

    def split_states(
        self, start: Tensor
    ) -> tuple[Tensor, Tensor]:  # (B, *E) -> (M,), (N, B, prod E)
        """The indices of the free elements, and the states of all steps."""
        assert self.free is not None
        states = torch.stack((start, *self.runs[-1])).flatten(2)
        return self.free[0].flatten().nonzero().squeeze(1), states


def _unsupported_change(reason: str) -> ValueError:
    return ValueError(
        f"this pipeline changes its latents between steps, {reason}, which cannot be done in "
        "parallel; use it without a soft mask, or with the recipes speca and taylorseer"
    )


@dataclass(frozen=True)
class PartialDenoiser:
    """The free part of a chain: states are (R, M), the free elements of `inner`'s (R, *E)."""

    inner: Denoiser
    shape: torch.Size  # E
    free: Tensor  # (M,) indices into the flattened E
    known: Tensor  # (N, B, prod E); free elements are ignored

    kernel = delegate_to("inner.kernel")
    width = delegate_to("inner.width")

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        prediction = self.inner.predict(self.restore_states(states, step, row), step, row)
        std = None if prediction.std is None else prediction.std.flatten(1)[:, self.free]
        return Prediction(prediction.clean.flatten(1)[:, self.free], std)

    def restore_states(
        self, states: Tensor, step: Tensor, row: Tensor
    ) -> Tensor:  # (R, M) -> (R, *E)
        """The full states, with the known part filled in."""
        full = self.known[step, row].index_copy(1, self.free, states)
        return full.reshape(-1, *self.shape)
