"""The denoising network of a diffusers pipeline, as a `Denoiser` of chains.

`rehearsal` makes one per call of the pipeline; it holds the conditions of that call.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.laws.kernels import GaussianKernel
from mmspec.modalities.diffusion.conditions import NetworkCall
from mmspec.modalities.diffusion.guidance_fit import Join
from mmspec.modalities.diffusion.schedulers import Sampler, sampler
from mmspec.targets.denoising import Prediction

NETWORKS = ("unet", "transformer")


@dataclass(frozen=True)
class PipelineDenoiser:
    """A pipeline's network with its conditions, its guidance and its scheduler's grid."""

    network: Network
    calls: tuple[NetworkCall, ...]
    images: int  # B
    join: Join
    sampler: Sampler

    @property
    def kernel(self) -> GaussianKernel:
        return self.sampler.kernel

    @property
    def width(self) -> int:
        """Branches of guidance per state."""
        return sum(call.rows for call in self.calls) // self.images

    def predict(self, states: Tensor, step: Tensor, row: Tensor) -> Prediction:
        shown = self.sampler.scaled(states, step)
        branches: list[Tensor] = []
        for call in self.calls:
            count = call.rows // self.images
            index = (torch.arange(count, device=row.device)[:, None] * self.images + row).flatten()
            full = call.completed(repeated(shown, count), index)
            args, kwargs = call.replay(full, index, step.repeat(count))
            branches += self.network(args, kwargs, len(index)).chunk(count)
        return self.sampler.clean(self.join(branches, step), states, step)


class Network:
    """The denoising network of a pipeline, called through its own `__call__`, hooks included."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.name = pipe, _network_name(pipe)
        self.outline: Outline | None = None  # learned in the first rehearsal
        self.rows = 0  # so far

    @property
    def module(self) -> Any:
        """The pipeline's own at this moment; it may have been compiled since."""
        return getattr(self.pipe, self.name)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> Tensor:
        self.rows += rows
        output: Tensor = _content(self.module(*args, **kwargs))
        return output

    def learn(self, call: NetworkCall) -> Outline:
        """The form of the network's output, from one row of a call, twice where it has no other.

        Raises ValueError where the network cannot be shown another number of rows than the
        pipeline's.
        """
        if self.outline is not None:
            return self.outline
        index = torch.zeros(2 if call.rows == 1 else 1, dtype=torch.int64, device=call.shown.device)
        args, kwargs = call.replay(call.shown[index], index, index)
        self.rows += len(index)
        try:
            given = self.module(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise _rowless(self.name, error) from error
        shape = _content(given).shape
        if len(shape) != call.shown.dim() or shape[0] != len(index):
            raise _rowless(self.name, f"an output of shape {tuple(shape)}")
        ratios = zip(shape[1:], call.shown.shape[1:], strict=True)
        self.outline = Outline(tuple(ratios), given)
        return self.outline


def _rowless(name: str, reason: object) -> ValueError:
    return ValueError(
        f"pipe.{name} cannot be shown other states than the pipeline's: with another number of "
        f"rows it gives {reason!r}; this pipeline is not supported by recipes that sample chains: "
        "use speca or taylorseer, which with lite=True takes any network"
    )


@dataclass(frozen=True)
class Outline:
    """How the output of a network is shaped and wrapped."""

    ratios: tuple[tuple[int, int], ...]  # output to input size per axis of E
    example: Any

    def random(self, call: NetworkCall, seed: int) -> Tensor:  # (rows, *E'), float32
        """Numbers in the shape of the output of `call`.

        Rows have a part in common, and every place along every axis a scale of its own: so a norm,
        a deviation or a projection, over whatever axes, comes out differently in every draw, where
        that of plain normal numbers would hardly move.
        """
        inner = call.shown.shape[1:]
        pairs = zip(inner, self.ratios, strict=True)
        shape = (call.rows, *(size * out // into for size, (out, into) in pairs))
        device, column = call.shown.device, (call.rows, *(1,) * len(inner))
        generator = torch.Generator(device).manual_seed(seed)
        normal = functools.partial(torch.randn, generator=generator, device=device)
        made = normal(shape) + normal(column) * normal(shape[1:])
        for axis, size in enumerate(shape):
            scale = (0.3 * normal(size)).exp()
            made *= scale.reshape(-1, *(1,) * (len(shape) - axis - 1))
        return made + normal(column)

    def wrapped(self, content: Tensor) -> Any:
        """Content as the network would return it."""
        if isinstance(self.example, Tensor):
            return content
        if isinstance(self.example, tuple):
            return (content, *self.example[1:])
        return type(self.example)(content)


def pictures(arguments: Mapping[str, Any]) -> int | None:
    """How many pictures (or clips) a call makes; None where its arguments do not say."""
    each = arguments.get("num_images_per_prompt") or arguments.get("num_videos_per_prompt") or 1
    for name in ("prompt", "prompt_embeds", "class_labels"):
        value = arguments.get(name)
        if value is not None:
            return each * (1 if isinstance(value, str | int) else len(value))
    batch: int | None = arguments.get("batch_size")
    return batch


def check_network(pipe: Any) -> None:
    """Refuse a pipeline whose network cannot be asked out of order. Raises ValueError."""
    name, kind = _network_name(pipe), type(pipe).__name__
    for part, module in pipe.components.items():
        if module is not None and ("controlnet" in part or part == "adapter"):
            raise ValueError(
                f"{kind} has a {part}, whose output depends on the state; it cannot be sampled in "
                "parallel: use the pipeline without it, or a recipe that keeps its loop, such as "
                "taylorseer with lite=True"
            )
        if module is not None and part.startswith(f"{name}_"):
            raise ValueError(
                f"{kind} has a {part}, which takes turns with its {name} (experts for parts of the "
                "chain), but all steps of a window share one network; use taylorseer or speca"
            )
    if getattr(getattr(pipe, name), "is_cache_enabled", False):
        raise ValueError(
            f"a cache is enabled on pipe.{name}, which counts steps in order and changes the "
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


def _content(output: Any) -> Tensor:
    content: Tensor = output if isinstance(output, Tensor) else output[0]
    return content


def repeated(states: Tensor, count: int) -> Tensor:  # (R, *E) -> (count * R, *E)
    """States once per branch, branch major."""
    return states.repeat(count, *(1,) * (states.dim() - 1))
