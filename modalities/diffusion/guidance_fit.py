"""How a pipeline makes one prediction of the branches of its guidance.

Pipelines differ: negative or positive prompt first, one call or two, variance channels cut off, a
scale that changes with the step. The rule is read off the pipeline itself: in a rehearsal its loop
gets random numbers for network outputs, and what it makes of them is fitted by the rules below. A
pipeline whose guidance is none of them is refused; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.laws.kernels import at_step

_FITTED = 4096  # numbers that a scale is fitted to


class Join(Protocol):
    """Makes the prediction of R states out of their W branches."""

    def __call__(self, branches: Sequence[Tensor], step: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Weighted:
    """A weighted sum of the branches: classifier-free guidance (Ho & Salimans 2022), or one branch.

    raw = sum_j w_j branch_j, cut to the first `size` channels.
    """

    weights: Tensor  # (N, W) float64
    axis: int = 1
    size: int | None = None  # channels kept; None = all

    def __call__(self, branches: Sequence[Tensor], step: Tensor) -> Tensor:
        cut = [_cut(branch, self.axis, self.size).float() for branch in branches]
        if len(cut) == 2 and bool(((self.weights.sum(-1) - 1).abs() < 1e-6).all()):
            scale = at_step(self.weights[:, 1], step, cut[0])  # as pipelines compute it
            return cut[0] + scale * (cut[1] - cut[0])
        parts = [at_step(self.weights[:, j], step, part) * part for j, part in enumerate(cut)]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class Rescaled:
    """Guidance brought back to the deviation of the positive branch (Lin et al. 2024, eq. 15-16).

    `negative` and `positive` are the places of the branches.
    """

    scale: float
    share: float  # of the rescaled prediction; diffusers calls it guidance_rescale
    negative: int = 0
    positive: int = 1
    axis: int = 1
    size: int | None = None

    def __call__(self, branches: Sequence[Tensor], step: Tensor) -> Tensor:
        cut = [_cut(branch, self.axis, self.size).float() for branch in branches]
        negative, positive = cut[self.negative], cut[self.positive]
        guided = negative + self.scale * (positive - negative)
        inner = tuple(range(1, guided.dim()))
        ratio = positive.std(inner, keepdim=True) / guided.std(inner, keepdim=True)
        return self.share * (guided * ratio) + (1 - self.share) * guided


class Fitter:
    """Collects what a pipeline made of random branches, step by step."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.scale = arguments.get("guidance_scale")
        self.share = arguments.get("guidance_rescale")
        self.axis, self.size = 1, None  # type: int, int | None
        self.weights: list[Tensor] = []
        self.rescaled: Rescaled | None = None

    def add(self, branches: Sequence[Tensor], raw: Tensor) -> None:
        """One step: branches (B, *E) each, and the prediction made of them."""
        if not self.weights and self.rescaled is None:
            self.axis, self.size = _narrowed(branches[0], raw)
        if self.rescaled is None:
            weights = self._fit(branches, raw)
            if weights is not None:
                self.weights.append(weights)
                return
        if self.weights or not self._rescale(branches, raw):
            raise ValueError(
                f"this pipeline joins its {len(branches)} branches of guidance in a way that is "
                "not known (known: weighted sums, and guidance_rescale, the same kind in every "
                "step); switch that kind of guidance off"
            )

    def join(self) -> Join:
        """The rule that all steps agree with."""
        if self.rescaled is not None:
            return self.rescaled
        return Weighted(torch.stack(self.weights), self.axis, self.size)

    def _fit(self, branches: Sequence[Tensor], raw: Tensor) -> Tensor | None:  # (W,)
        cut = [_cut(branch, self.axis, self.size) for branch in branches]
        columns = [part.flatten()[:_FITTED].double().cpu() for part in cut]
        wanted = raw.flatten()[:_FITTED].double().cpu()
        weights: Tensor = torch.linalg.lstsq(torch.stack(columns, 1), wanted[:, None]).solution
        weights = weights[:, 0].mul(1e6).round().div(1e6)  # off by the rounding of the pipeline
        made = Weighted(weights[None], self.axis, self.size)
        return weights if self._agrees(made, branches, raw) else None

    def _rescale(self, branches: Sequence[Tensor], raw: Tensor) -> bool:
        if self.scale is None or self.share is None or len(branches) != 2:
            return False
        orders = [(0, 1), (1, 0)]
        made = [Rescaled(self.scale, self.share, *pair, self.axis, self.size) for pair in orders]
        for rule in made if self.rescaled is None else [self.rescaled]:
            if self._agrees(rule, branches, raw):
                self.rescaled = rule
                return True
        return False

    def _agrees(self, join: Join, branches: Sequence[Tensor], raw: Tensor) -> bool:
        step = torch.zeros(raw.shape[0], dtype=torch.int64, device=raw.device)
        exact = raw.dtype in (torch.float32, torch.float64)
        limit = (1e-4 if exact else 2e-2) * raw.float().abs().max()
        return bool((join(branches, step) - raw.float()).abs().max() <= limit)


def _narrowed(branch: Tensor, raw: Tensor) -> tuple[int, int | None]:
    """The axis along which the pipeline cuts its network's output, and what it keeps."""
    if branch.shape == raw.shape:
        return 1, None
    differing = [
        axis
        for axis, pair in enumerate(zip(branch.shape, raw.shape, strict=False))
        if pair[0] != pair[1]
    ]
    if branch.dim() != raw.dim() or len(differing) != 1 or differing[0] == 0:
        raise ValueError(
            f"the network's output {tuple(branch.shape)} and what the pipeline gives its scheduler "
            f"{tuple(raw.shape)} do not fit; this pipeline is not supported"
        )
    return differing[0], raw.shape[differing[0]]


def _cut(branch: Tensor, axis: int, size: int | None) -> Tensor:
    return branch if size is None else branch.narrow(axis, 0, size)
