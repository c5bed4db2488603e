"""The form of what networks return, and random numbers in that form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.forecast.features import like, tensors
from mmspec.modalities.diffusion.conditions import NetworkCall, stacked


@dataclass(frozen=True)
class Outline:
    """How the output of a denoising network is shaped and wrapped, whatever the size of states."""

    ratios: tuple[tuple[int, int], ...]  # output to input size per axis of E
    example: Any

    @classmethod
    def of(cls, example: Any, output: Sequence[int], states: Sequence[int]) -> Outline:
        """Of an output of the shape `output` for states of the shape `states`, without rows."""
        return cls(tuple(zip(output, states, strict=True)), example)

    def random(self, call: NetworkCall, seed: int) -> list[Tensor]:  # one of (rows, *E'), float32
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
        return [made + normal(column)]

    def wrapped(self, parts: Sequence[Tensor]) -> Any:
        """The output as the network would return it."""
        example, made = self.example, parts[0]
        if isinstance(example, Tensor):
            return made
        first = list(made.unbind(0)) if isinstance(example[0], list) else made
        if isinstance(example, tuple):
            return (first, *example[1:])
        return type(example)(first)


@dataclass(frozen=True)
class Shapes:
    """The shapes of all tensors that a ControlNet computes for states of one size."""

    sizes: tuple[torch.Size, ...]  # without rows
    example: Any

    @classmethod
    def of(cls, example: Any, rows: int) -> Shapes:
        """Read off an output for so many rows. Raises ValueError where some tensor has others."""
        found = tensors(example)
        if any(part.dim() == 0 or len(part) != rows for part in found):
            raise ValueError(f"tensors of the shapes {[tuple(part.shape) for part in found]}")
        return cls(tuple(part.shape[1:] for part in found), example)

    def random(self, call: NetworkCall, seed: int) -> list[Tensor]:  # (rows, *size) each
        """Normal numbers in these shapes."""
        device, kinds = call.shown.device, [part.dtype for part in tensors(self.example)]
        generator = torch.Generator(device).manual_seed(seed)
        return [
            torch.randn((call.rows, *size), generator=generator, device=device).to(kind)
            for size, kind in zip(self.sizes, kinds, strict=True)
        ]

    def wrapped(self, parts: Sequence[Tensor]) -> Any:
        """The output as the network would return it."""
        return like(self.example, list(parts))


def content(output: Any) -> Tensor:
    """The prediction in the output of a denoising network."""
    return stacked(output if isinstance(output, Tensor) else output[0])
