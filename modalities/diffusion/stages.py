"""The steps of a pipeline's loop, by which networks they call and how.

step       0 1 2 3 | 4 5 6        the first expert of two | the second one
step       0 1 2 3 4 | 5 6        with two branches of guidance | with one
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.modalities.diffusion.call_recorder import Recorder, outline
from mmspec.modalities.diffusion.guidance_fit import Fitter
from mmspec.modalities.diffusion.network import Network, PipelineDenoiser, Stage
from mmspec.modalities.diffusion.schedulers import Sampler


@dataclass(frozen=True)
class Made:
    """One call of a network's stand-in."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: list[Tensor]  # its tensors


class Stages:
    """The steps of a loop by what they call, over all rehearsals."""

    def __init__(self, arguments: Mapping[str, Any], guiders: Sequence[str]) -> None:
        self.found: dict[Any, tuple[list[Recorder], Fitter]] = {}
        self.at: dict[int, Any] = {}  # step -> stage
        self._begin = functools.partial(Fitter, arguments, guiders)

    def of(self, step: int, made: Sequence[Made]) -> tuple[list[Recorder], Fitter]:
        """The stage of a step. Raises ValueError where another rehearsal had another one."""
        key = tuple((one.name, outline(one.args, one.kwargs)) for one in made)
        if self.at.setdefault(step, key) != key:
            raise ValueError(
                "this pipeline calls its networks by what the states are, which cannot be done in "
                "parallel; use the recipes speca and taylorseer"
            )
        if key not in self.found:
            recorders = [Recorder(one.name, one.args, one.kwargs) for one in made]
            self.found[key] = recorders, self._begin()
        return self.found[key]

    @property
    def is_sure(self) -> bool:
        """Whether conditions and guidance of all steps are known not to depend on the states."""
        return all(
            fitter.is_sure and all(one.is_sure for one in recorders)
            for recorders, fitter in self.found.values()
        )

    def denoiser(self, network: Network, images: int, sampler: Sampler) -> PipelineDenoiser:
        """The networks of so many images, on the grid of a sampler."""
        steps, places = len(self.at), list(self.found)
        stages = tuple(
            Stage(tuple(one.call(steps) for one in recorders), fitter.join(steps))
            for recorders, fitter in self.found.values()
        )
        at = torch.tensor([places.index(self.at[step]) for step in range(steps)])
        return PipelineDenoiser(network, stages, at, images, sampler)
