"""Record the calls of a pipeline's networks over its loop, separating conditions from states.

The steps are grouped into stages, by the networks they call and how:

    step       0 1 2 3 | 4 5 6        the first of two experts | the second
    step       0 1 2 3 4 | 5 6        with two guidance branches | with one
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.modalities.diffusion.conditions import (
    PER_FRAME,
    ExtraInputs,
    NetworkCall,
    Path,
    Residual,
    Versions,
    find_states,
    get_path,
    iterate_leaves,
    squeeze_axis,
    stack_states,
)
from mmspec.modalities.diffusion.guidance_fit import GuidanceFitter
from mmspec.modalities.diffusion.network import Network, PipelineDenoiser, Stage
from mmspec.modalities.diffusion.schedulers import Sampler


class Recorder:
    """Records one call of a network in each step of a pipeline's loop, in one or two traced runs.

    The states are random in each run, so a value that changes with them is not a condition. A
    scalar that is equal in all rows counts as a timestep; two runs must agree on any other value
    that changes.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.first = NetworkCall(name, args, kwargs, find_states(args, kwargs))
        _check_rows(self.first)
        self.residuals: dict[Path, Residual] = {}
        self.values: dict[Path, list[Any]] = {}
        self.at: dict[Path, dict[int, int]] = {}  # step -> index into the values
        self.runs: dict[int, int] = {}  # number of records of a step
        self.latest_states = self.first.recorded_states  # the states of the latest step
        self.extra_inputs: ExtraInputs | None = None  # constant inputs in the states, if any
        self.inserted_axis: int | None = None

    def add(
        self,
        step: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        computed: Sequence[Sequence[Tensor]] = (),
        images: int = 1,
    ) -> None:
        """Record the call in a step; other networks `computed` tensors, by call and part.

        Raises ValueError for an argument that depends on the states.
        """
        for path, value in iterate_leaves((args, kwargs)):
            if path[: len(self.first.states)] == self.first.states:
                continue
            residual = _find_residual(value, computed, images)
            if self.runs and residual != self.residuals.get(path):
                raise _state_dependent(path)
            if residual is not None:
                self.residuals[path] = residual
            else:
                self._record_value(path, step, value)
        self.runs[step] = self.runs.get(step, 0) + 1
        self.latest_states = stack_states(get_path((args, kwargs), self.first.states))

    def _record_value(self, path: Path, step: int, value: Any) -> None:
        values, at = self.values.setdefault(path, []), self.at.setdefault(path, {})
        if step in at:
            if not _is_same(values[at[step]], value, 1e-3):
                raise _state_dependent(path)
            return
        if not values or not _is_same(values[-1], value):
            values.append(value)
        if len(values) > 1 and self.first.is_listed and len(path) > 2:
            raise _state_dependent(path)  # may be per state, with other states in other steps
        at[step] = len(values) - 1

    @property
    def is_sure(self) -> bool:
        """Whether the records suffice to exclude a dependence on the states."""
        if self.extra_inputs is not None and not bool(self.extra_inputs.is_latent.all()):
            return all(runs > 1 for runs in self.runs.values())  # a match may be accidental
        changing = [values for values in self.values.values() if len(values) > 1]
        if all(runs > 1 for runs in self.runs.values()):
            return True
        return len(self.runs) > 1 and all(
            _read_scalar(one) is not None for v in changing for one in v
        )

    def matches_states(self, latents: Tensor) -> bool:  # (rows, *E)
        """Whether the latest states are these latents with the same extra inputs as before.

        Those may be an image or a mask, as channels or sequence positions, or a known part of the
        latents, such as a first frame.
        """
        states = self._squeeze_states(latents)
        if states.dim() != latents.dim():
            return False
        is_first = sum(self.runs.values()) == 1
        extra = _find_extra_inputs(states, latents) if is_first else self.extra_inputs
        if extra is None or extra.template.shape != states.shape:
            return (
                extra is None
                and states.shape == latents.shape
                and bool(_is_close(states, latents).all())
            )
        is_latent = extra.is_latent & _is_close(
            states.narrow(extra.axis, extra.offset, extra.size), latents
        )
        extra = replace(extra, is_latent=is_latent)
        rebuilt = extra(latents.to(states), torch.arange(len(states), device=states.device))
        others = torch.ones_like(states, dtype=torch.bool)
        others.narrow(extra.axis, extra.offset, extra.size).copy_(~is_latent)
        if not bool(is_latent.any()) or not torch.equal(rebuilt[others], states[others]):
            return False
        self.extra_inputs = extra
        return True

    def _squeeze_states(self, latents: Tensor) -> Tensor:
        """The states without an axis of size 1 that the latents lack."""
        if self.latest_states.dim() == latents.dim() + 1 and self.inserted_axis is None:
            ones = [
                axis for axis, size in enumerate(self.latest_states.shape) if axis and size == 1
            ]
            near = [
                axis for axis in ones if self.latest_states.squeeze(axis).shape == latents.shape
            ]
            self.inserted_axis = near[0] if near else None
        return squeeze_axis(self.latest_states, self.inserted_axis)

    def strip_output(self, output: Tensor) -> Tensor:
        """The output for the latents alone."""
        return replace(
            self.first, extra_inputs=self.extra_inputs, inserted_axis=self.inserted_axis
        ).strip_output(output)

    def call(self, steps: int) -> NetworkCall:
        """The recorded call, with tables over `steps` steps."""
        scalars, versions = dict[Path, Tensor](), dict[Path, Versions]()
        for path, values in self.values.items():
            if len(values) == 1:
                continue
            at = torch.tensor([self.at[path].get(step, 0) for step in range(steps)])
            numbers = [number for number in map(_read_scalar, values) if number is not None]
            if len(numbers) == len(values):
                scalars[path] = torch.stack(numbers)[at.to(numbers[0].device)]
            else:
                versions[path] = Versions(tuple(values), at)
        return replace(
            self.first,
            scalars=scalars,
            versions=versions,
            residuals=self.residuals,
            extra_inputs=self.extra_inputs,
            inserted_axis=self.inserted_axis,
        )


@dataclass(frozen=True)
class StubCall:
    """One call of a stub network."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: list[Tensor]  # its tensors


class Stages:
    """The steps of a loop grouped by their network calls, over all traced runs."""

    def __init__(self, arguments: Mapping[str, Any], guiders: Sequence[str]) -> None:
        self.found: dict[Any, tuple[list[Recorder], GuidanceFitter]] = {}
        self.at: dict[int, Any] = {}  # step -> stage
        self._begin = functools.partial(GuidanceFitter, arguments, guiders)

    def find_stage(
        self, step: int, calls: Sequence[StubCall]
    ) -> tuple[list[Recorder], GuidanceFitter]:
        """The stage of a step. Raises ValueError if another run had a different stage."""
        key = tuple((one.name, call_signature(one.args, one.kwargs)) for one in calls)
        if self.at.setdefault(step, key) != key:
            raise ValueError(
                "the network calls of this pipeline depend on the states, which cannot be done in "
                "parallel; use the recipes speca and taylorseer"
            )
        if key not in self.found:
            recorders = [Recorder(one.name, one.args, one.kwargs) for one in calls]
            self.found[key] = recorders, self._begin()
        return self.found[key]

    @property
    def is_sure(self) -> bool:
        """Whether conditions and guidance of all steps are confirmed independent of the states."""
        return all(
            fitter.is_sure and all(one.is_sure for one in recorders)
            for recorders, fitter in self.found.values()
        )

    def denoiser(self, network: Network, images: int, sampler: Sampler) -> PipelineDenoiser:
        """The denoiser of `images` images, on the timesteps of a sampler."""
        steps, places = len(self.at), list(self.found)
        stages = tuple(
            Stage(tuple(one.call(steps) for one in recorders), fitter.build_guidance(steps))
            for recorders, fitter in self.found.values()
        )
        at = torch.tensor([places.index(self.at[step]) for step in range(steps)])
        return PipelineDenoiser(network, stages, at, images, sampler)


def _check_rows(call: NetworkCall) -> None:
    """Raises ValueError if there are more rows of prompts than of states."""
    for path, value in iterate_leaves((call.args, call.kwargs)):
        is_words = isinstance(value, Tensor) and path[-1] in PER_FRAME
        if is_words and len(value) > call.rows and len(value) != call.rows * call.frames:
            raise ValueError(
                f"the network gets {len(value)} rows of {path[-1]} for {call.rows} of states; "
                "give as many prompts, or embeddings of prompts, as images"
            )


def call_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The paths of a call's values and its rows, equal for the same call in different steps."""
    paths = tuple(path for path, _ in iterate_leaves((args, kwargs)))
    return paths, len(get_path((args, kwargs), find_states(args, kwargs)))


def _find_residual(
    value: Any, computed: Sequence[Sequence[Tensor]], images: int
) -> Residual | None:
    """The source of an argument in the tensors `computed`, per branch.

    These are random, so equal values imply the same source.
    """
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) % images:
        return None
    branches = value.split(images)
    for call, parts in enumerate(computed):
        for part, whole in enumerate(parts):
            if whole.shape[1:] != value.shape[1:]:
                continue
            sources = whole.to(value.dtype).split(images)
            found = [_find_branch(one, sources) for one in branches]
            if any(one is not None for one in found) and -1 not in found:
                return Residual(call, part, tuple(found))
    return None


def _find_branch(one: Tensor, sources: Sequence[Tensor]) -> int | None:
    """The index of a branch among others; None for zeros, -1 if absent."""
    for place, other in enumerate(sources):
        if torch.equal(one, other):
            return place
    return -1 if bool(one.any()) else None


def _find_extra_inputs(states: Tensor, latents: Tensor) -> ExtraInputs | None:
    """The extra inputs in the states, with the position of the latents; None without any."""
    sizes = list(zip(states.shape, latents.shape, strict=True))
    longer = [axis for axis, (size, own) in enumerate(sizes) if size != own]
    if len(longer) > 1 or 0 in longer or any(size < own for size, own in sizes):
        return None
    axis = longer[0] if longer else 1
    own = latents.shape[axis]
    near = {
        at: _is_close(states.narrow(axis, at, own), latents) for at in (0, states.shape[axis] - own)
    }
    offset = max(near, key=lambda at: int(near[at].sum()))  # latents first or last
    if not longer and bool(near[0].all()):
        return None
    return ExtraInputs(states, axis, offset, own, near[offset])


def _is_close(states: Tensor, latents: Tensor) -> Tensor:  # (rows, *E) x2 -> (rows, *E) bool
    """Elementwise equality up to the rounding of the first argument's dtype."""
    share = 1e-4 if states.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.isclose(states.float(), latents, rtol=share, atol=share / 10, equal_nan=True)


def _is_same(old: Any, new: Any, share: float = 0.0) -> bool:
    """Whether two values are equal; floats up to `share` of the largest magnitude."""
    if old is new:
        return True
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return type(old) is type(new) and bool(old == new)
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    if not share or not old.is_floating_point() or not old.numel():
        return torch.equal(old, new)
    return torch.allclose(old, new, rtol=0, atol=share * float(old.abs().max()), equal_nan=True)


def _read_scalar(value: Any) -> Tensor | None:  # ()
    """The scalar of a tensor whose entries are all equal; None otherwise."""
    if not isinstance(value, Tensor) or value.dim() > 1:
        return None
    flat = value.reshape(-1)
    return None if bool((flat != flat[:1]).any()) else flat[0]


def _state_dependent(path: Path) -> ValueError:
    return ValueError(
        f"this pipeline passes {path[-1]!r} to its network with values that depend on the states "
        "and are not the output of a network such as a ControlNet; all steps of a window share one "
        "call: leave that feature out, or use the recipes speca and taylorseer"
    )
