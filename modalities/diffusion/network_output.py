"""The format of network outputs, and random outputs in that format."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.forecast.features import rebuild_output, tensors
from mmspec.modalities.diffusion.conditions import NetworkCall, stack_states


@dataclass(frozen=True)
class DenoiserOutput:
    """Shape and container of a denoising network's output, relative to the size of the states."""

    ratios: tuple[tuple[int, int], ...]  # output to input size per axis of E
    example: Any

    @classmethod
    def of(cls, example: Any, output: Sequence[int], states: Sequence[int]) -> DenoiserOutput:
        """From the shapes of an output and its states, without rows."""
        return cls(tuple(zip(output, states, strict=True)), example)

    def random(self, call: NetworkCall, seed: int) -> list[Tensor]:  # one of (rows, *E'), float32
        """Random numbers in the shape of the output of `call`.

        Rows share a component, and every index of every axis has its own scale. So a norm, standard
        deviation or projection over any axes differs between draws, whereas that of plain normal
        numbers would be almost constant.
        """
        inner = call.recorded_states.shape[1:]
        pairs = zip(inner, self.ratios, strict=True)
        shape = (call.rows, *(size * out // into for size, (out, into) in pairs))
        device, column = call.recorded_states.device, (call.rows, *(1,) * len(inner))
        generator = torch.Generator(device).manual_seed(seed)
        normal = functools.partial(torch.randn, generator=generator, device=device)
        made = normal(shape) + normal(column) * normal(shape[1:])
        for axis, size in enumerate(shape):
            scale = (0.3 * normal(size)).exp()
            made *= scale.reshape(-1, *(1,) * (len(shape) - axis - 1))
        return [made + normal(column)]

    def wrap_output(self, parts: Sequence[Tensor]) -> Any:
        """The output as the network would return it."""
        example, made = self.example, parts[0]
        if isinstance(example, Tensor):
            return made
        first = list(made.unbind(0)) if isinstance(example[0], list) else made
        if isinstance(example, tuple):
            return (first, *example[1:])
        return type(example)(first)


@dataclass(frozen=True)
class ControlNetOutput:
    """Shapes of all tensors in a ControlNet's output, for states of one size."""

    sizes: tuple[torch.Size, ...]  # without rows
    example: Any

    @classmethod
    def of(cls, example: Any, rows: int) -> ControlNetOutput:
        """From an output for `rows` rows. Raises ValueError for tensors with another number."""
        found = tensors(example)
        if any(part.dim() == 0 or len(part) != rows for part in found):
            raise ValueError(f"tensors of the shapes {[tuple(part.shape) for part in found]}")
        return cls(tuple(part.shape[1:] for part in found), example)

    def random(self, call: NetworkCall, seed: int) -> list[Tensor]:  # (rows, *size) each
        """Random normal numbers in these shapes."""
        device, kinds = call.recorded_states.device, [part.dtype for part in tensors(self.example)]
        generator = torch.Generator(device).manual_seed(seed)
        return [
            torch.randn((call.rows, *size), generator=generator, device=device).to(kind)
            for size, kind in zip(self.sizes, kinds, strict=True)
        ]

    def wrap_output(self, parts: Sequence[Tensor]) -> Any:
        """The output as the network would return it."""
        return rebuild_output(self.example, list(parts))


def read_prediction(output: Any) -> Tensor:
    """The prediction tensor in the output of a denoising network."""
    return stack_states(output if isinstance(output, Tensor) else output[0])
