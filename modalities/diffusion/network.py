"""The denoising networks of a diffusers pipeline, as a `Denoiser` of chains.

Mostly that is one. It may be two that take turns over the steps (Wan 2.2), and another one beside
it may compute some of its arguments from the same states (ControlNet): all of them together are one
function of state and step. `pipeline_trace` makes a denoiser per call of the pipeline; it holds the
conditions of that call.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.distributions.kernels import GaussianKernel
from mmspec.drafters.forecast.features import tensors
from mmspec.errors import described
from mmspec.modalities.diffusion.conditions import NetworkCall
from mmspec.modalities.diffusion.guidance_fit import Join
from mmspec.modalities.diffusion.network_output import Outline, Shapes, content
from mmspec.modalities.diffusion.schedulers import Sampler, sampler
from mmspec.targets.continuous.denoising import Prediction

NETWORKS = ("unet", "transformer")
CONTROL = "controlnet"  # computes arguments of the other networks


@dataclass(frozen=True)
class Stage:
    """The calls of networks that some steps have in common, in their order, and their guidance."""

    calls: tuple[NetworkCall, ...]
    join: Join

    @property
    def rows(self) -> int:
        """Of the denoising network, for all images of the call."""
        return sum(call.rows for call in self.calls if call.name != CONTROL)


@dataclass(frozen=True)
class PipelineDenoiser:
    """A pipeline's networks with their conditions, guidance and the scheduler's grid."""

    network: Network
    stages: tuple[Stage, ...]
    at: Tensor  # (N,) which stage a step belongs to
    images: int  # B
    sampler: Sampler

    @property
    def kernel(self) -> GaussianKernel:
        return self.sampler.kernel

    @property
    def width(self) -> int:
        """Branches of guidance per state, where there are the most."""
        return max(stage.rows for stage in self.stages) // self.images

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        shown = self.sampler.scaled(states, step)
        if len(self.stages) == 1:
            return self.sampler.clean(self._raw(self.stages[0], shown, step, row), states, step)
        at = self.at.to(step.device)[step]
        places = at.unique().tolist()
        groups = [(at == place).nonzero()[:, 0] for place in places]
        found = [
            self._raw(self.stages[place], shown[rows], step[rows], row[rows])
            for place, rows in zip(places, groups, strict=True)
        ]
        return self.sampler.clean(_in_order(found, groups), states, step)

    def _raw(self, stage: Stage, shown: Tensor, step: Tensor, row: Tensor) -> Tensor:
        """What the guided networks say of states (R, *E), as the scheduler would be given it."""
        computed: list[list[tuple[Tensor, ...]]] = []  # by call, part and branch
        branches: list[Tensor] = []
        for call in stage.calls:
            count = call.rows // self.images
            index = (torch.arange(count, device=row.device)[:, None] * self.images + row).flatten()
            residuals = {path: one.of(computed) for path, one in call.residuals.items()}
            full = call.completed(repeated(shown, count), index)
            parts = self._asked(call, full, index, step.repeat(count), residuals)
            if call.name == CONTROL:
                computed.append([part.chunk(count) for part in parts])
            else:
                branches += call.flat(parts[0]).chunk(count)
        return stage.join(branches, step)

    def _asked(
        self,
        call: NetworkCall,
        states: Tensor,
        index: Tensor,
        step: Tensor,
        residuals: Mapping[Any, Tensor],
    ) -> list[Tensor]:
        """The output for rows of a call, part by part; rows told others get calls of their own."""
        groups, found = call.groups(step), list[list[Tensor]]()
        for rows in groups:
            given = {path: one[rows] for path, one in residuals.items()}
            args, kwargs = call.replay(states[rows], index[rows], step[rows], given)
            found.append(self.network(call.name, args, kwargs, len(rows)))
        return [_in_order(parts, groups) for parts in zip(*found, strict=True)]


def _in_order(parts: Sequence[Tensor], groups: Sequence[Tensor]) -> Tensor:
    """What was computed for groups of rows, put together again."""
    return (
        parts[0] if len(groups) == 1 else torch.cat(list(parts))[torch.cat(list(groups)).argsort()]
    )


class Network:
    """The denoising networks of a pipeline, called through their `__call__`, hooks included."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.name = pipe, _network_name(pipe)
        self.outlines: dict[str, Outline] = {}  # learned in the first rehearsal
        self.shapes: dict[Any, Shapes] = {}  # of what a ControlNet computes, by the size of states
        self.rows = 0  # of the denoising networks, so far

    @property
    def module(self) -> Any:
        """The pipeline's own at this moment; it may have been compiled since."""
        return getattr(self.pipe, self.name)

    @property
    def names(self) -> list[str]:
        """All networks that a step may call: the denoising ones, and what helps them."""
        parts = self.pipe.components.items()
        experts = [name for name, part in parts if _is_expert(self.name, name, part)]
        control = [name for name, part in parts if name == CONTROL and part is not None]
        return [self.name, *experts, *control]

    def __call__(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int
    ) -> list[Tensor]:
        """The tensors of a network's output: one, or all that a ControlNet computes."""
        output = getattr(self.pipe, name)(*args, **kwargs)
        if name == CONTROL:
            return tensors(output)
        self.rows += rows
        return [content(output)]

    def learn(self, call: NetworkCall) -> Outline | Shapes:
        """The form of a network's output, from one row of a call, twice where it has no other.

        Raises ValueError where the network cannot be shown another number of rows than the
        pipeline's.
        """
        size = (call.name, call.shown.shape[1:])
        if call.name in self.outlines:
            return self.outlines[call.name]
        if size in self.shapes:
            return self.shapes[size]
        index = torch.zeros(2 if call.rows == 1 else 1, dtype=torch.int64, device=call.shown.device)
        args, kwargs = call.replay(call.shown[index], index, index)
        try:
            given = getattr(self.pipe, call.name)(*args, **kwargs)
            if call.name == CONTROL:
                self.shapes[size] = Shapes.of(given, len(index))
                return self.shapes[size]
            shape = content(given).shape
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise _rowless(call.name, error) from error
        self.rows += len(index)
        if len(shape) != call.shown.dim() or shape[0] != len(index):
            raise _rowless(call.name, f"an output of shape {tuple(shape)}")
        self.outlines[call.name] = Outline.of(given, shape[1:], call.shown.shape[1:])
        return self.outlines[call.name]


def _is_expert(own: str, name: str, part: Any) -> bool:
    """Whether a part takes turns with the network `own`."""
    return name.startswith(f"{own}_") and isinstance(part, nn.Module)


def _rowless(name: str, reason: object) -> ValueError:
    return ValueError(
        f"pipe.{name} cannot be shown other states than the pipeline's: with another number of "
        f"rows it gives {reason!r}; this pipeline is not supported by recipes that sample chains: "
        "use speca or taylorseer, which with lite=True takes any network; if latents= or image= "
        "are given, check their shape"
    )


def pictures(arguments: Mapping[str, Any]) -> int | None:
    """How many pictures (or clips) a call makes; None where its arguments do not say.

    Raises ValueError for none.
    """
    each = arguments.get("num_images_per_prompt") or arguments.get("num_videos_per_prompt") or 1
    for name in ("prompt", "prompt_embeds", "class_labels"):
        value = arguments.get(name)
        if isinstance(value, str | int | Sequence | Tensor):
            count = 1 if isinstance(value, str | int) else len(value)
            if not count:
                raise ValueError(
                    f"{name}={described(value)} asks for no picture; give at least one"
                )
            return each * count
    batch: int | None = arguments.get("batch_size")
    return batch


def check_network(pipe: Any) -> None:
    """Refuse a pipeline whose network cannot be asked out of order. Raises ValueError."""
    for part in Network(pipe).names:
        if getattr(getattr(pipe, part), "is_cache_enabled", False):
            raise ValueError(
                f"a cache is enabled on pipe.{part}, which counts steps in order and changes the "
                "target; call disable_cache() on it first"
            )


def check_scheduler(scheduler: Any, deterministic: bool = False) -> None:
    """Refuse a scheduler whose chain no argument of a call could make fit. Raises ValueError.

    It must draw noise, unless a `deterministic` chain will do.
    """
    scheduler = copy.copy(scheduler)
    shifts = scheduler.config.get("use_dynamic_shifting", False)
    scheduler.set_timesteps(4, **({"mu": 1.0} if shifts else {}))
    try:
        sampler(scheduler, deterministic=deterministic)
    except ValueError as refused:
        try:
            sampler(scheduler, eta=1.0)
        except ValueError:
            raise refused from None


def _network_name(pipe: Any) -> str:
    for name in NETWORKS:
        if getattr(pipe, name, None) is not None:
            return name
    raise ValueError(
        f"{type(pipe).__name__} has no denoising network (none of {', '.join(NETWORKS)}); give a "
        "pipeline that samples with one"
    )


def repeated(states: Tensor, count: int) -> Tensor:  # (R, *E) -> (count * R, *E)
    """States once per branch, branch major."""
    return states.repeat(count, *(1,) * (states.dim() - 1))
