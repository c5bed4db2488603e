"""Identify how a pipeline combines its guidance branches into one prediction.

Pipelines differ: negative or positive prompt first, one call or two, variance channels cut off, a
scale that changes with the step. The rule is inferred from the pipeline itself: in a traced run its
loop gets random network outputs, and the result is fitted by the rules below. A pipeline with any
other guidance is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.distributions.kernels import at_step

_FITTED = 4096  # values used to fit a scale
_RESCALE = "guidance_rescale"
_SCALES = ("guidance_scale", _RESCALE, "true_cfg_scale")
# Arguments of pipelines with which guidance depends on the values of the branches.
_DEPENDENT = (
    _RESCALE,
    "cfg_normalization",
    "enable_cfg_renorm",
    "use_cfg_zero_star",
    "stg_scale",
    "true_cfg_scale",
)
# Those that only limit a norm, which random outputs may never reach.
_LIMITS = ("cfg_normalization", "enable_cfg_renorm")


class Guidance(Protocol):
    """Combines the W branches of R states into one prediction."""

    def __call__(self, branches: Sequence[Tensor], step: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class WeightedGuidance:
    """A weighted sum of the branches: classifier-free guidance (Ho & Salimans 2022), or one branch.

    raw = sum_j w_j branch_j, cut to the first `size` channels.
    """

    weights: Tensor  # (N, W) float64
    axis: int = 1
    size: int | None = None  # number of channels; None = all

    def __call__(self, branches: Sequence[Tensor], step: Tensor) -> Tensor:
        cut = [_cut(branch, self.axis, self.size).float() for branch in branches]
        if len(cut) == 2 and bool(((self.weights.sum(-1) - 1).abs() < 1e-6).all()):
            scale = at_step(self.weights[:, 1], step, cut[0])  # as pipelines compute it
            return cut[0] + scale * (cut[1] - cut[0])
        parts = [at_step(self.weights[:, j], step, part) * part for j, part in enumerate(cut)]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class RescaledGuidance:
    """Guidance rescaled to the magnitude of the positive branch.

    The magnitude is the standard deviation over the image (Lin et al. 2024, eq. 15-16), or with
    `along_last` the norm along the last axis, as in Lumina 2 and Qwen-Image. `negative` and
    `positive` are branch indices; `sign` is -1 if the network predicts the negated flow.
    """

    scale: float
    share: float = 1.0  # of the rescaled prediction; diffusers calls it guidance_rescale
    negative: int = 0
    positive: int = 1
    axis: int = 1
    size: int | None = None
    along_last: bool = False
    sign: float = 1.0

    def __call__(self, branches: Sequence[Tensor], step: Tensor) -> Tensor:
        cut = [_cut(branch, self.axis, self.size).float() for branch in branches]
        negative, positive = cut[self.negative], cut[self.positive]
        guided = negative + self.scale * (positive - negative)
        if self.along_last:
            ratio = positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
        else:
            inner = tuple(range(1, guided.dim()))
            ratio = positive.std(inner, keepdim=True) / guided.std(inner, keepdim=True)
        guidance: Tensor = self.share * (guided * ratio) + (1 - self.share) * guided
        return self.sign * guidance


class GuidanceFitter:
    """Collects a pipeline's predictions from random branches, for every step of one or two runs.

    Weights fitted to one draw may be accidental: any function of two branches with one free scalar,
    such as rescaled guidance, equals a weighted sum for a single draw. So the weights of a step
    must be reproduced by a second, independent draw. Another step serves as that draw if all steps
    agree; otherwise a second run is needed to distinguish a schedule from a rule that depends on
    the branches.
    """

    def __init__(self, arguments: Mapping[str, Any], guiders: Sequence[str] = ()) -> None:
        self.arguments, self.guiders = arguments, guiders
        self.axis, self.size = 1, None  # type: int, int | None
        self.rules: list[RescaledGuidance] | None = (
            None  # rules without free parameters that match all draws so far
        )
        self.weights: dict[int, list[Tensor | None]] = {}  # by step, one entry per draw
        self.limit = 0.0  # of the difference of two fits, relative to the largest weight
        self.count = 0  # number of branches

    def add(self, step: int, branches: Sequence[Tensor], raw: Tensor) -> None:
        """Add a draw of a step: branches (B, *E) each, and the pipeline's prediction."""
        if self.rules is None:
            self.axis, self.size = _find_cut(branches[0], raw)
            self.rules, self.count = self._named_rules(len(branches)), len(branches)
            self.limit = 1e-5 if _is_wide(raw) else 1e-2
        self.rules = [rule for rule in self.rules if self._agrees(rule, branches, raw)]
        draws = self.weights.setdefault(step, [])
        draws.append(self._fit(branches, raw))
        if not self.rules and any(None in fits_ for fits_ in self.weights.values()):
            raise self._unsupported_rule("not supported")
        limits = [name for name in _LIMITS if self.arguments.get(name) and len(branches) > 1]
        if limits and (not self.rules or "enable_cfg_renorm" in limits):
            raise self._unsupported_rule("limited by a norm")
        if not self.rules and not self._is_same(draws):
            raise self._unsupported_rule("different for other outputs of the same step")

    @property
    def is_sure(self) -> bool:
        """Whether every step is confirmed by a second draw."""
        draws = list(self.weights.values())
        is_repeated = all(len(fits_) > 1 for fits_ in draws)
        all_fits = [one for fits_ in draws for one in fits_]
        return bool(self.rules) or is_repeated or (len(all_fits) > 1 and self._is_same(all_fits))

    def build_guidance(self, steps: int) -> Guidance:
        """The rule that matches all steps, with tables over `steps` steps."""
        assert self.is_sure
        if self.rules:
            return self.rules[0]
        fits = {step: _stack(draws).mean(0) for step, draws in self.weights.items()}
        other = next(iter(fits.values()))  # for steps of other stages, which are not used
        table = torch.stack([fits.get(step, other) for step in range(steps)])
        return WeightedGuidance(table, self.axis, self.size)

    def _named_rules(self, branches: int) -> list[RescaledGuidance]:
        """The rescaling rules given by the pipeline's arguments."""
        scale, share, other = (self.arguments.get(name) for name in _SCALES)
        orders = [(0, 1), (1, 0)] if branches == 2 else []
        signs = [(pair, sign) for pair in orders for sign in (1.0, -1.0)]
        return [
            *(
                RescaledGuidance(scale, share, *pair, self.axis, self.size)
                for pair in orders
                if scale is not None and share
            ),
            *(
                RescaledGuidance(one, 1.0, *pair, self.axis, self.size, True, sign)
                for one in (scale, other)
                for pair, sign in signs
                if one not in (None, 1)
            ),
        ]

    def _fit(self, branches: Sequence[Tensor], raw: Tensor) -> Tensor | None:  # (W,)
        cut = [_cut(branch, self.axis, self.size) for branch in branches]
        columns = [part.flatten()[:_FITTED].double().cpu() for part in cut]
        expected = raw.flatten()[:_FITTED].double().cpu()
        weights: Tensor = torch.linalg.lstsq(torch.stack(columns, 1), expected[:, None]).solution
        weights = weights[:, 0].mul(1e6).round().div(1e6)  # removes the pipeline's rounding error
        guidance = WeightedGuidance(weights[None], self.axis, self.size)
        return weights if self._agrees(guidance, branches, raw) else None

    def _agrees(self, join: Guidance, branches: Sequence[Tensor], raw: Tensor) -> bool:
        step = torch.zeros(raw.shape[0], dtype=torch.int64, device=raw.device)
        limit = (1e-4 if _is_wide(raw) else 2e-2) * raw.float().abs().max()
        return bool((join(branches, step) - raw.float()).abs().max() <= limit)

    def _is_same(self, draws: Sequence[Tensor | None]) -> bool:
        fits = _stack(draws)
        return bool((fits - fits[0]).abs().max() <= self.limit * fits.abs().max())

    def _unsupported_rule(self, reason: str) -> ValueError:
        given = [name for name in _DEPENDENT if self.arguments.get(name)]
        named = [f"{name}={self.arguments[name]!r}" for name in given]
        causes = [*named, *(f"pipe.{name}" for name in self.guiders)]
        remedy = f"switch off {', '.join(causes)}, or " if causes else ""
        return ValueError(
            f"this pipeline combines the {self.count} outputs of its network by a rule that "
            f"is {reason} (supported are a sum with fixed weights in every step, guidance_rescale, "
            "and the norm of the positive branch along the last axis, equal in all steps); "
            f"{remedy}choose a recipe that keeps the pipeline's loop: speca or taylorseer"
        )


def _stack(draws: Sequence[Tensor | None]) -> Tensor:  # (draws, W)
    return torch.stack([one for one in draws if one is not None])


def _is_wide(raw: Tensor) -> bool:
    return raw.dtype in (torch.float32, torch.float64)


def _find_cut(branch: Tensor, raw: Tensor) -> tuple[int, int | None]:
    """The axis along which the pipeline cuts its network's output, and the remaining size."""
    if branch.shape == raw.shape:
        return 1, None
    differing = [
        axis
        for axis, pair in enumerate(zip(branch.shape, raw.shape, strict=False))
        if pair[0] != pair[1]
    ]
    if branch.dim() != raw.dim() or len(differing) != 1 or differing[0] == 0:
        raise ValueError(
            f"the network's output {tuple(branch.shape)} does not fit the scheduler's input "
            f"{tuple(raw.shape)}; this pipeline is not supported"
        )
    return differing[0], raw.shape[differing[0]]


def _cut(branch: Tensor, axis: int, size: int | None) -> Tensor:
    return branch if size is None else branch.narrow(axis, 0, size)
