"""Follows the calls of a pipeline's network through its loop, and tells conditions from states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.modalities.diffusion.conditions import (
    PER_FRAME,
    Around,
    NetworkCall,
    Path,
    Residual,
    Versions,
    at_path,
    find_states,
    leaves,
    squeezed,
    stacked,
)


class Recorder:
    """Follows one call of a network through the steps of a pipeline's loop, maybe in two runs.

    States are random, and others in each run: what changes with them is no condition. A number for
    all rows alike is taken for a timestep; of all else that changes two runs must agree.
    """

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.first = NetworkCall(name, args, kwargs, find_states(args, kwargs))
        _check_rows(self.first)
        self.residuals: dict[Path, Residual] = {}
        self.values: dict[Path, list[Any]] = {}
        self.at: dict[Path, dict[int, int]] = {}  # step -> index into the values
        self.runs: dict[int, int] = {}  # how often a step was seen
        self.shown = self.first.shown  # the states of the latest step
        self.around: Around | None = None  # what they hold beside the latents, if anything
        self.inserted: int | None = None

    def add(
        self,
        step: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        computed: Sequence[Sequence[Tensor]] = (),
        images: int = 1,
    ) -> None:
        """The call in a step, in which other networks have `computed` tensors, by call and part.

        Raises ValueError where something changes that depends on the states.
        """
        for path, value in leaves((args, kwargs)):
            if path[: len(self.first.states)] == self.first.states:
                continue
            residual = _residual(value, computed, images)
            if self.runs and residual != self.residuals.get(path):
                raise _unsteady(path)
            if residual is not None:
                self.residuals[path] = residual
            else:
                self._note(path, step, value)
        self.runs[step] = self.runs.get(step, 0) + 1
        self.shown = stacked(at_path((args, kwargs), self.first.states))

    def _note(self, path: Path, step: int, value: Any) -> None:
        values, at = self.values.setdefault(path, []), self.at.setdefault(path, {})
        if step in at:
            if not _same(values[at[step]], value, 1e-3):
                raise _unsteady(path)
            return
        if not values or not _same(values[-1], value):
            values.append(value)
        if len(values) > 1 and self.first.is_listed and len(path) > 2:
            raise _unsteady(path)  # maybe of an entry for each state: other ones in other steps
        at[step] = len(values) - 1

    @property
    def is_sure(self) -> bool:
        """Whether enough was seen to know that nothing depends on the states."""
        if self.around is not None and not bool(self.around.seen.all()):
            return all(runs > 1 for runs in self.runs.values())  # it may be there by chance
        changing = [values for values in self.values.values() if len(values) > 1]
        if all(runs > 1 for runs in self.runs.values()):
            return True
        return len(self.runs) > 1 and all(_number(one) is not None for v in changing for one in v)

    def shows(self, latents: Tensor) -> bool:  # (rows, *E)
        """Whether the latest states are these latents, and beside them what was there before.

        That may be a picture to start from or a mask, more channels or more places of a sequence,
        or a part of the latents that is known, such as a first frame.
        """
        shown = self._flat(latents)
        if shown.dim() != latents.dim():
            return False
        is_first = sum(self.runs.values()) == 1
        around = _around(shown, latents) if is_first else self.around
        if around is None or around.shown.shape != shown.shape:
            return (
                around is None
                and shown.shape == latents.shape
                and bool(_near(shown, latents).all())
            )
        seen = around.seen & _near(shown.narrow(around.axis, around.offset, around.size), latents)
        around = replace(around, seen=seen)
        rebuilt = around(latents.to(shown), torch.arange(len(shown), device=shown.device))
        others = torch.ones_like(shown, dtype=torch.bool)
        others.narrow(around.axis, around.offset, around.size).copy_(~seen)
        if not bool(seen.any()) or not torch.equal(rebuilt[others], shown[others]):
            return False
        self.around = around
        return True

    def _flat(self, latents: Tensor) -> Tensor:
        """The states without an axis of size 1 that the latents have not."""
        if self.shown.dim() == latents.dim() + 1 and self.inserted is None:
            ones = [axis for axis, size in enumerate(self.shown.shape) if axis and size == 1]
            near = [axis for axis in ones if self.shown.squeeze(axis).shape == latents.shape]
            self.inserted = near[0] if near else None
        return squeezed(self.shown, self.inserted)

    def flat(self, output: Tensor) -> Tensor:
        """An output for the latents alone."""
        return replace(self.first, around=self.around, inserted=self.inserted).flat(output)

    def call(self, steps: int) -> NetworkCall:
        """The call, with its tables over so many steps."""
        told, varied = dict[Path, Tensor](), dict[Path, Versions]()
        for path, values in self.values.items():
            if len(values) == 1:
                continue
            at = torch.tensor([self.at[path].get(step, 0) for step in range(steps)])
            numbers = [number for number in map(_number, values) if number is not None]
            if len(numbers) == len(values):
                told[path] = torch.stack(numbers)[at.to(numbers[0].device)]
            else:
                varied[path] = Versions(tuple(values), at)
        return replace(
            self.first,
            told=told,
            varied=varied,
            residuals=self.residuals,
            around=self.around,
            inserted=self.inserted,
        )


def _check_rows(call: NetworkCall) -> None:
    """Raises ValueError where words are told to more rows than there are."""
    for path, value in leaves((call.args, call.kwargs)):
        is_words = isinstance(value, Tensor) and path[-1] in PER_FRAME
        if is_words and len(value) > call.rows and len(value) != call.rows * call.frames:
            raise ValueError(
                f"the network is told {len(value)} rows of {path[-1]} for {call.rows} of states; "
                "give as many prompts, or embeddings of prompts, as pictures"
            )


def outline(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What calls must share to be one call in different steps: where values are, and how many."""
    paths = tuple(path for path, _ in leaves((args, kwargs)))
    return paths, len(at_path((args, kwargs), find_states(args, kwargs)))


def _residual(value: Any, computed: Sequence[Sequence[Tensor]], images: int) -> Residual | None:
    """Where in the tensors `computed` an argument comes from, branch by branch.

    Those are random, so equal numbers are no accident.
    """
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) % images:
        return None
    ours = value.split(images)
    for call, parts in enumerate(computed):
        for part, whole in enumerate(parts):
            if whole.shape[1:] != value.shape[1:]:
                continue
            theirs = whole.to(value.dtype).split(images)
            found = [_place(one, theirs) for one in ours]
            if any(one is not None for one in found) and -1 not in found:
                return Residual(call, part, tuple(found))
    return None


def _place(one: Tensor, theirs: Sequence[Tensor]) -> int | None:
    """The place of a branch among others; None for zeros, -1 for what is not there."""
    for place, other in enumerate(theirs):
        if torch.equal(one, other):
            return place
    return -1 if bool(one.any()) else None


def _around(shown: Tensor, latents: Tensor) -> Around | None:
    """Where the latents stand in the states, if those hold anything else as well."""
    sizes = list(zip(shown.shape, latents.shape, strict=True))
    longer = [axis for axis, (size, own) in enumerate(sizes) if size != own]
    if len(longer) > 1 or 0 in longer or any(size < own for size, own in sizes):
        return None
    axis = longer[0] if longer else 1
    own = latents.shape[axis]
    near = {at: _near(shown.narrow(axis, at, own), latents) for at in (0, shown.shape[axis] - own)}
    offset = max(near, key=lambda at: int(near[at].sum()))  # before what is beside them, or behind
    if not longer and bool(near[0].all()):
        return None
    return Around(shown, axis, offset, own, near[offset])


def _near(shown: Tensor, latents: Tensor) -> Tensor:  # (rows, *E) x2 -> (rows, *E) bool
    """Where two states are equal but for the rounding of the first one's type."""
    share = 1e-4 if shown.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.isclose(shown.float(), latents, rtol=share, atol=share / 10, equal_nan=True)


def _same(old: Any, new: Any, share: float = 0.0) -> bool:
    """Whether two values are equal, or of floating numbers at most a share of the largest apart."""
    if old is new:
        return True
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return type(old) is type(new) and bool(old == new)
    if old.shape != new.shape or old.dtype != new.dtype:
        return False
    if not share or not old.is_floating_point() or not old.numel():
        return torch.equal(old, new)
    return torch.allclose(old, new, rtol=0, atol=share * float(old.abs().max()), equal_nan=True)


def _number(value: Any) -> Tensor | None:  # ()
    """The one number that a tensor holds, for all rows alike."""
    if not isinstance(value, Tensor) or value.dim() > 1:
        return None
    flat = value.reshape(-1)
    return None if bool((flat != flat[:1]).any()) else flat[0]


def _unsteady(path: Path) -> ValueError:
    return ValueError(
        f"this pipeline gives {path[-1]!r} to its network, and other values of it for other states,"
        " but not as a network such as a ControlNet computed it; all steps of a window share one "
        "call: leave that feature out, or use the recipes speca and taylorseer"
    )
