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

from mmspec.distributions.kernels import at_step

_FITTED = 4096  # numbers that a scale is fitted to
_RESCALE = "guidance_rescale"
_SCALES = ("guidance_scale", _RESCALE, "true_cfg_scale")
# Arguments of pipelines that make guidance depend on what the branches are.
_DEPENDENT = (
    _RESCALE,
    "cfg_normalization",
    "enable_cfg_renorm",
    "use_cfg_zero_star",
    "stg_scale",
    "true_cfg_scale",
)
# Those of them that only keep a norm below a limit, which random outputs may never reach.
_LIMITS = ("cfg_normalization", "enable_cfg_renorm")


class Join(Protocol):
    """Makes the prediction of R states out of their W branches."""

    def __call__(self, branches: Sequence[Tensor], step: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class WeightedJoin:
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
    """Guidance brought back to the size of the positive branch.

    That is its deviation over the picture (Lin et al. 2024, eq. 15-16), or with `along_last` its
    norm along the last axis, as Lumina 2 and Qwen-Image have it. `negative` and `positive` are the
    places of the branches; `sign` is -1 where the network predicts the flow the other way round.
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
        made: Tensor = self.share * (guided * ratio) + (1 - self.share) * guided
        return self.sign * made


class Fitter:
    """Collects what a pipeline made of random branches, in every step and maybe in two runs.

    Weights that are fitted to one draw may be an accident of it: whatever is done to two numbers
    with a third, the scale of guidance brought back to a deviation or a norm among it, is a
    weighted sum once. So the weights of every step must come out of a second, independent draw
    too. Those of another step serve where all steps agree; where they differ, only a second run
    can tell a schedule from a rule that depends on the branches.
    """

    def __init__(self, arguments: Mapping[str, Any], guiders: Sequence[str] = ()) -> None:
        self.arguments, self.guiders = arguments, guiders
        self.axis, self.size = 1, None  # type: int, int | None
        self.rules: list[Rescaled] | None = None  # without a free number, and never wrong so far
        self.weights: dict[int, list[Tensor | None]] = {}  # by step, one entry per draw
        self.limit = 0.0  # of the difference of two fits, in units of the largest weight
        self.count = 0  # of branches

    def add(self, step: int, branches: Sequence[Tensor], raw: Tensor) -> None:
        """One draw of a step: branches (B, *E) each, and the prediction made of them."""
        if self.rules is None:
            self.axis, self.size = _narrowed(branches[0], raw)
            self.rules, self.count = self._known(len(branches)), len(branches)
            self.limit = 1e-5 if _is_wide(raw) else 1e-2
        self.rules = [rule for rule in self.rules if self._agrees(rule, branches, raw)]
        draws = self.weights.setdefault(step, [])
        draws.append(self._fit(branches, raw))
        if not self.rules and any(None in drawn for drawn in self.weights.values()):
            raise self._unknown("none of the known")
        limits = [name for name in _LIMITS if self.arguments.get(name) and len(branches) > 1]
        if limits and (not self.rules or "enable_cfg_renorm" in limits):
            raise self._unknown("limited by a norm")
        if not self.rules and not self._same(draws):
            raise self._unknown("another one for other outputs of the same step")

    @property
    def is_sure(self) -> bool:
        """Whether two draws agree in every step."""
        draws = list(self.weights.values())
        repeated = all(len(drawn) > 1 for drawn in draws)
        everything = [one for drawn in draws for one in drawn]
        return bool(self.rules) or repeated or (len(everything) > 1 and self._same(everything))

    def join(self, steps: int) -> Join:
        """The rule that all steps agree with, those of so many that there were."""
        assert self.is_sure
        if self.rules:
            return self.rules[0]
        fits = {step: _stack(draws).mean(0) for step, draws in self.weights.items()}
        other = next(iter(fits.values()))  # for steps that are never asked about
        table = torch.stack([fits.get(step, other) for step in range(steps)])
        return WeightedJoin(table, self.axis, self.size)

    def _known(self, branches: int) -> list[Rescaled]:
        """The rules that the pipeline's arguments name."""
        scale, share, other = (self.arguments.get(name) for name in _SCALES)
        orders = [(0, 1), (1, 0)] if branches == 2 else []
        signs = [(pair, sign) for pair in orders for sign in (1.0, -1.0)]
        return [
            *(
                Rescaled(scale, share, *pair, self.axis, self.size)
                for pair in orders
                if scale is not None and share
            ),
            *(
                Rescaled(one, 1.0, *pair, self.axis, self.size, True, sign)
                for one in (scale, other)
                for pair, sign in signs
                if one not in (None, 1)
            ),
        ]

    def _fit(self, branches: Sequence[Tensor], raw: Tensor) -> Tensor | None:  # (W,)
        cut = [_cut(branch, self.axis, self.size) for branch in branches]
        columns = [part.flatten()[:_FITTED].double().cpu() for part in cut]
        wanted = raw.flatten()[:_FITTED].double().cpu()
        weights: Tensor = torch.linalg.lstsq(torch.stack(columns, 1), wanted[:, None]).solution
        weights = weights[:, 0].mul(1e6).round().div(1e6)  # off by the rounding of the pipeline
        made = WeightedJoin(weights[None], self.axis, self.size)
        return weights if self._agrees(made, branches, raw) else None

    def _agrees(self, join: Join, branches: Sequence[Tensor], raw: Tensor) -> bool:
        step = torch.zeros(raw.shape[0], dtype=torch.int64, device=raw.device)
        limit = (1e-4 if _is_wide(raw) else 2e-2) * raw.float().abs().max()
        return bool((join(branches, step) - raw.float()).abs().max() <= limit)

    def _same(self, draws: Sequence[Tensor | None]) -> bool:
        fits = _stack(draws)
        return bool((fits - fits[0]).abs().max() <= self.limit * fits.abs().max())

    def _unknown(self, what: str) -> ValueError:
        given = [name for name in _DEPENDENT if self.arguments.get(name)]
        named = [f"{name}={self.arguments[name]!r}" for name in given]
        causes = [*named, *(f"pipe.{name}" for name in self.guiders)]
        remedy = f"switch off {', '.join(causes)}, or " if causes else ""
        return ValueError(
            f"this pipeline makes its prediction of the {self.count} outputs of its network by a "
            f"rule that is {what} (known are a sum with fixed weights in every step, "
            f"guidance_rescale, and the norm of the positive branch along the last axis, in all "
            f"steps alike); {remedy}choose a recipe that leaves the loop to the "
            "pipeline: speca or taylorseer"
        )


def _stack(draws: Sequence[Tensor | None]) -> Tensor:  # (draws, W)
    return torch.stack([one for one in draws if one is not None])


def _is_wide(raw: Tensor) -> bool:
    return raw.dtype in (torch.float32, torch.float64)


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
