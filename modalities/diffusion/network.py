"""The denoising networks of a diffusers pipeline, as a `Denoiser` of chains.

Usually there is one network. There may be two for different ranges of steps (Wan 2.2), and another
one may compute arguments from the same states (ControlNet); together they are one function of state
and step. `pipeline_trace` builds a denoiser per call of the pipeline, with the conditions of that
call.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.forecast.features import tensors
from mmspec.errors import format_value
from mmspec.modalities.diffusion.conditions import NetworkCall
from mmspec.modalities.diffusion.guidance_fit import Guidance
from mmspec.modalities.diffusion.network_output import (
    ControlNetOutput,
    DenoiserOutput,
    read_prediction,
)
from mmspec.modalities.diffusion.schedulers import Sampler, read_scheduler
from mmspec.models.quantized_pipelines import DENOISERS
from mmspec.targets.continuous.denoising import Prediction

ROUNDING = 0.05  # of the largest output, also in bfloat16
INFLUENCE = 0.003  # of the largest output: other rows of equally many may change a row by less
CONTROL = "controlnet"  # computes arguments of the other networks


@dataclass(frozen=True)
class Stage:
    """The network calls shared by some steps, in order, and their guidance."""

    calls: tuple[NetworkCall, ...]
    guidance: Guidance

    @property
    def rows(self) -> int:
        """Rows of the denoising network, for all images of the call."""
        return sum(call.rows for call in self.calls if call.name != CONTROL)


@dataclass(frozen=True)
class PipelineDenoiser:
    """A pipeline's networks with their conditions, guidance and the scheduler's timesteps."""

    network: Network
    stages: tuple[Stage, ...]
    at: Tensor  # (N,) index of the stage of a step
    images: int  # B
    sampler: Sampler

    @property
    def kernel(self) -> GaussianKernel:
        return self.sampler.kernel

    @property
    def width(self) -> int:
        """Maximal number of guidance branches per state."""
        return max(stage.rows for stage in self.stages) // self.images

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        inputs = self.sampler.scale_states(states, step)
        if len(self.stages) == 1:
            return self.sampler.clean(
                self._predict_raw(self.stages[0], inputs, step, row), states, step
            )
        at = self.at.to(step.device)[step]
        places = at.unique().tolist()
        groups = [(at == place).nonzero()[:, 0] for place in places]
        found = [
            self._predict_raw(self.stages[place], inputs[rows], step[rows], row[rows])
            for place, rows in zip(places, groups, strict=True)
        ]
        return self.sampler.clean(_restore_order(found, groups), states, step)

    def _predict_raw(self, stage: Stage, inputs: Tensor, step: Tensor, row: Tensor) -> Tensor:
        """Guided output for states (R, *E), as passed to the scheduler."""
        computed: list[list[tuple[Tensor, ...]]] = []  # by call, part and branch
        branches: list[Tensor] = []
        for call in stage.calls:
            count = call.rows // self.images
            index = (torch.arange(count, device=row.device)[:, None] * self.images + row).flatten()
            residuals = {path: one.of(computed) for path, one in call.residuals.items()}
            full = call.complete_states(repeat_states(inputs, count), index)
            parts = self._call_groups(call, full, index, step.repeat(count), residuals)
            if call.name == CONTROL:
                computed.append([part.chunk(count) for part in parts])
            else:
                branches += call.strip_output(parts[0]).chunk(count)
        return stage.guidance(branches, step)

    def _call_groups(
        self,
        call: NetworkCall,
        states: Tensor,
        index: Tensor,
        step: Tensor,
        residuals: Mapping[Any, Tensor],
    ) -> list[Tensor]:
        """The output for rows of a call by part; rows with other arguments use separate calls."""
        groups, found = call.groups(step), list[list[Tensor]]()
        for rows in groups:
            given = {path: one[rows] for path, one in residuals.items()}
            args, kwargs = call.replay(states[rows], index[rows], step[rows], given)
            found.append(self.network(call.name, args, kwargs, len(rows)))
        return [_restore_order(parts, groups) for parts in zip(*found, strict=True)]


def _restore_order(parts: Sequence[Tensor], groups: Sequence[Tensor]) -> Tensor:
    """Concatenate outputs of groups of rows in the original order."""
    return (
        parts[0] if len(groups) == 1 else torch.cat(list(parts))[torch.cat(list(groups)).argsort()]
    )


class Network:
    """The denoising networks of a pipeline, called through their `__call__`, hooks included."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.name = pipe, _network_name(pipe)
        self.denoiser_outputs: dict[str, DenoiserOutput] = {}  # probed in the first traced run
        self.control_outputs: dict[Any, ControlNetOutput] = {}  # of ControlNets, by state size
        self.rows = 0  # of the denoising networks, so far

    @property
    def module(self) -> Any:
        """The pipeline's current network, which may have been compiled since."""
        return getattr(self.pipe, self.name)

    @property
    def names(self) -> list[str]:
        """All networks that a step may call: denoisers and ControlNets."""
        parts = self.pipe.components.items()
        experts = [name for name, part in parts if _is_expert(self.name, name, part)]
        control = [name for name, part in parts if name == CONTROL and part is not None]
        return [self.name, *experts, *control]

    def __call__(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int
    ) -> list[Tensor]:
        """The tensors of a network's output: one, or several for a ControlNet."""
        output = getattr(self.pipe, name)(*args, **kwargs)
        if name == CONTROL:
            return tensors(output)
        self.rows += rows
        return [read_prediction(output)]

    def probe_output(self, call: NetworkCall) -> DenoiserOutput | ControlNetOutput:
        """Probe the format of an output with a few equal rows, another number than a call has.

        Raises ValueError if the network does not accept another number of rows than the pipeline's,
        or computes equal rows differently: then it reads rows along another axis.
        """
        size = (call.name, call.recorded_states.shape[1:])
        if call.name in self.denoiser_outputs:
            return self.denoiser_outputs[call.name]
        if size in self.control_outputs:
            return self.control_outputs[size]
        count = next(one for one in itertools.count(2) if call.rows % one)
        index = torch.zeros(count, dtype=torch.int64, device=call.recorded_states.device)
        args, kwargs = call.replay(call.recorded_states[index], index, index)
        control = None
        try:
            given = getattr(self.pipe, call.name)(*args, **kwargs)
            if call.name == CONTROL:
                control = ControlNetOutput.of(given, len(index))
            else:
                found = read_prediction(given)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise _unsupported_rows(call.name, error) from error
        if control is not None:
            self._check_independence(call, index, tensors(given))
            self.control_outputs[size] = control
            return control
        self.rows += len(index)
        shape = found.shape
        if len(shape) != call.recorded_states.dim() or shape[0] != len(index):
            raise _unsupported_rows(call.name, f"an output of shape {tuple(shape)}")
        if not _has_equal_rows(found):
            raise _unsupported_rows(call.name, "different outputs for equal rows")
        self._check_independence(call, index, [found])
        self.denoiser_outputs[call.name] = DenoiserOutput.of(
            given, shape[1:], call.recorded_states.shape[1:]
        )
        return self.denoiser_outputs[call.name]

    def _check_independence(
        self, call: NetworkCall, index: Tensor, expected: Sequence[Tensor]
    ) -> None:
        """Raises ValueError if the first of some rows is changed by the states of the others.

        Rows of a chain would then depend on drafts. Forwards of as many rows round equally.
        """
        states = call.recorded_states[index]
        states[1:] = -states[1:]
        args, kwargs = call.replay(states, index, index)
        found = self(call.name, args, kwargs, len(index))
        change = max(map(_relative_change, found, expected))
        if change > INFLUENCE:
            raise ValueError(
                f"pipe.{call.name} predicts up to {change:.1%} different for a state when "
                "other states are in its batch, as with activations quantized by one scale per "
                "tensor, so recipes that sample chains cannot be right; quantize weights only or "
                "per row (granularity=PerRow() of torchao), or use speca or taylorseer"
            )


def _relative_change(found: Tensor, expected: Tensor) -> float:  # (R, *E) x2
    """Of the first row, relative to its largest expected entry."""
    first = expected[0].float()
    size = first.abs().amax().clamp_min(1e-12)
    return float((found[0].float() - first).abs().amax() / size)


def _is_expert(own: str, name: str, part: Any) -> bool:
    """Whether a part is another expert beside the network `own`."""
    return name.startswith(f"{own}_") and isinstance(part, nn.Module)


def _has_equal_rows(output: Tensor) -> bool:
    """Whether all rows (R, *E) are equal within the rounding of a batch."""
    output = output.float()
    size = output.abs().amax().clamp_min(1e-12)
    return bool(((output - output[:1]).abs() <= ROUNDING * size).all() | output.isnan().any())


def _unsupported_rows(name: str, reason: object) -> ValueError:
    return ValueError(
        f"pipe.{name} does not accept other states than the pipeline's: with another number of "
        f"rows it gives {reason!r}; this pipeline is not supported by recipes that sample chains: "
        "use speca or taylorseer, which with lite=True takes any network; if latents= or image= "
        "are given, check their shape"
    )


def count_images(arguments: Mapping[str, Any]) -> int | None:
    """The number of images (or clips) of a call; None if its arguments do not determine it.

    Raises ValueError for zero.
    """
    each = arguments.get("num_images_per_prompt") or arguments.get("num_videos_per_prompt") or 1
    for name in ("prompt", "prompt_embeds", "class_labels"):
        value = arguments.get(name)
        if isinstance(value, str | int | Sequence | Tensor):
            count = 1 if isinstance(value, str | int) else len(value)
            if not count:
                raise ValueError(
                    f"{name}={format_value(value)} requests no image; give at least one"
                )
            return each * count
    batch: int | None = arguments.get("batch_size")
    return batch


def check_network(pipe: Any) -> None:
    """Raises ValueError for a pipeline whose network must be called in step order."""
    for part in Network(pipe).names:
        if getattr(getattr(pipe, part), "is_cache_enabled", False):
            raise ValueError(
                f"a cache is enabled on pipe.{part}, which counts steps in order and changes the "
                "target; call disable_cache() on it first"
            )


def check_scheduler(scheduler: Any, deterministic: bool = False) -> None:
    """Raises ValueError for a scheduler that no argument of a call makes usable.

    It must draw noise, unless a `deterministic` chain is accepted.
    """
    scheduler = copy.copy(scheduler)
    shifts = scheduler.config.get("use_dynamic_shifting", False)
    scheduler.set_timesteps(4, **({"mu": 1.0} if shifts else {}))
    try:
        read_scheduler(scheduler, deterministic=deterministic)
    except ValueError as refused:
        try:
            read_scheduler(scheduler, eta=1.0)
        except ValueError:
            raise refused from None


def _network_name(pipe: Any) -> str:
    for name in DENOISERS:
        if getattr(pipe, name, None) is not None:
            return name
    raise ValueError(
        f"{type(pipe).__name__} has no denoising network (none of {', '.join(DENOISERS)}); give a "
        "pipeline that samples with one"
    )


def repeat_states(states: Tensor, count: int) -> Tensor:  # (R, *E) -> (count * R, *E)
    """States once per branch, branch major."""
    return states.repeat(count, *(1,) * (states.dim() - 1))
