"""The arguments of a pipeline's network: one recorded call, replayed for any states of any images.

A pipeline calls its network with B images at one step, each in k guidance branches. The rows of a
recorded call are branch major, and so are those of a replay:

    recorded   negative of image 0, 1 | positive of image 0, 1
    replayed   negative of image 1, 1, 0 | positive of image 1, 1, 0      three states

Arguments may change from step to step if they do not depend on the states: scalars such as
timesteps, tensors with an entry per row, or any other value. Rows with different values of the last
kind are replayed in separate calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Path = tuple[str | int, ...]  # keys that lead to a value in (args, kwargs)

STATES = ("hidden_states", "sample")  # names of the states among a network's keywords
# Arguments per position of an image or a text, not per row.
UNBATCHED = frozenset(("img_ids", "txt_ids", "image_rotary_emb", "rotary_emb", "video_coords"))
# Arguments that may have several adjacent entries per row.
PER_FRAME = frozenset(("encoder_hidden_states",))


@dataclass(frozen=True)
class Residual:
    """An argument computed by another network in the same step (ControlNet)."""

    call: int  # which call of the step
    part: int  # which tensor of its output
    branches: tuple[int | None, ...]  # source branch of each branch; None = zeros

    def of(self, computed: Sequence[Sequence[Sequence[Tensor]]]) -> Tensor:
        """The argument, from tensors by call, part and branch."""
        parts = computed[self.call][self.part]
        empty = torch.zeros_like(parts[0])
        return torch.cat([empty if one is None else parts[one] for one in self.branches])


@dataclass(frozen=True)
class Versions:
    """Values of an argument that changes from step to step."""

    values: tuple[Any, ...]
    at: Tensor  # (N,) index of the value in each step


@dataclass(frozen=True)
class ExtraInputs:
    """Constant inputs concatenated with the latents, such as a mask or a first frame.

    The latents start at `offset` on an axis, between other channels or sequence positions, and are
    passed on where `seen`; elsewhere the input is constant.
    """

    template: Tensor  # (rows, *E')
    axis: int
    offset: int
    size: int  # of the latents on that axis
    is_latent: Tensor  # (rows, *E) bool

    def __call__(self, latents: Tensor, index: Tensor) -> Tensor:  # (R, *E), (R,) -> (R, *E')
        states = self.template[index].to(latents)
        own = states.narrow(self.axis, self.offset, self.size)
        own.copy_(torch.where(self.is_latent[index], latents, own))
        return states

    def strip_output(self, output: Tensor) -> Tensor:
        """The part of an output for the latents, if other inputs precede them."""
        is_whole = output.shape[self.axis] == self.template.shape[self.axis]
        if not self.offset or not is_whole:
            return output
        return output.narrow(self.axis, self.offset, self.size)


@dataclass(frozen=True)
class NetworkCall:
    """A recorded call of a network, with the arguments that change from step to step."""

    name: str  # of the network, in its pipeline
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    states: Path
    scalars: Mapping[Path, Tensor] = field(default_factory=dict)  # (N,) each: timesteps
    versions: Mapping[Path, Versions] = field(default_factory=dict)
    residuals: Mapping[Path, Residual] = field(default_factory=dict)
    extra_inputs: ExtraInputs | None = None  # constant inputs in the states
    inserted_axis: int | None = None  # an axis of size 1 in the states that the latents lack

    @property
    def rows(self) -> int:
        """Rows of the recorded call: images times branches."""
        return len(get_path((self.args, self.kwargs), self.states))

    @property
    def recorded_states(self) -> Tensor:  # (rows, *E)
        """The states of the recorded call."""
        return stack_states(get_path((self.args, self.kwargs), self.states))

    @property
    def frames(self) -> int:
        """Entries per row of per-frame arguments; a video UNet processes frames separately."""
        return (
            self.recorded_states.shape[2]
            if self.name == "unet" and self.recorded_states.dim() == 5
            else 1
        )

    @property
    def is_listed(self) -> bool:
        """Whether the states, and arguments per state, are lists."""
        return isinstance(get_path((self.args, self.kwargs), self.states), list)

    def complete_states(self, latents: Tensor, index: Tensor) -> Tensor:  # (R, *E), (R,)
        """The network's states for `latents` in the rows `index`."""
        shown = latents if self.extra_inputs is None else self.extra_inputs(latents, index)
        return shown if self.inserted_axis is None else shown.unsqueeze(self.inserted_axis)

    def strip_output(self, output: Tensor) -> Tensor:
        """The output for the latents alone."""
        output = squeeze_axis(output, self.inserted_axis)
        return output if self.extra_inputs is None else self.extra_inputs.strip_output(output)

    def groups(self, step: Tensor) -> list[Tensor]:  # (R,) -> indices into R
        """Groups of rows with equal arguments, each served by one call."""
        versions = [
            one.at.to(step.device)[step]
            for path, one in self.versions.items()
            if not self._is_table(path, one)
        ]
        if not versions:
            return [torch.arange(len(step), device=step.device)]
        _, group = torch.stack(versions).unique(dim=1, return_inverse=True)
        return [(group == one).nonzero()[:, 0] for one in range(int(group.max()) + 1)]

    def replay(
        self,
        states: Tensor,
        index: Tensor,
        step: Tensor,
        computed: Mapping[Path, Tensor] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # (R, *E), (R,), (R,)
        """Arguments for `states` in the rows `index` of the recorded call, one step per row.

        The rows must be in one of the `groups`; `computed` are their residuals.
        """

        def replace_value(path: Path, value: Any) -> Any:
            if path == self.states:
                shown = states.to(self.recorded_states.dtype)
                return list(shown.unbind(0)) if self.is_listed else shown
            if computed and path in computed:
                return computed[path]
            if path in self.scalars:
                return self.scalars[path].to(states.device)[step]
            if path in self.versions:
                return self._select_version(path, index, step)
            if self.is_listed and isinstance(value, list) and len(value) == self.rows:
                return [value[row] for row in index.tolist()]  # an entry for each state
            return (
                value[self._entries(path, value, index)] if self._is_batched(path, value) else value
            )

        args, kwargs = _map_nested(replace_value, (self.args, self.kwargs))
        return args, kwargs

    def _select_version(self, path: Path, index: Tensor, step: Tensor) -> Any:
        versions, first = self.versions[path], self.versions[path].values[0]
        at = versions.at.to(step.device)[step]
        if not self._is_table(path, versions):
            return versions.values[int(at[0])]
        at = at.repeat_interleave(self._entries_per_row(path, first)).to(first.device)
        return torch.stack(versions.values)[at, self._entries(path, first, index)]

    def _is_table(self, path: Path, versions: Versions) -> bool:
        """Whether the rows of one call may have different versions."""
        kinds = {one.shape if isinstance(one, Tensor) else None for one in versions.values}
        return len(kinds) == 1 and self._is_batched(path, versions.values[0])

    def _is_batched(self, path: Path, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.dim() == 0 or UNBATCHED & set(path):
            return False
        return value.shape[0] == self.rows * self._entries_per_row(path, value)

    def _entries_per_row(self, path: Path, value: Tensor) -> int:
        """Entries per row: several for per-frame arguments (AnimateDiff)."""
        return self.frames if path[-1] in PER_FRAME and len(value) > self.rows else 1

    def _entries(self, path: Path, value: Tensor, index: Tensor) -> Tensor:
        """The entries of the rows `index`, (R,) -> (R * each,)."""
        each = self._entries_per_row(path, value)
        inner = torch.arange(each, device=index.device)
        return (index[:, None] * each + inner).flatten().to(value.device)


def stack_states(states: Any) -> Tensor:
    """States as one tensor; some networks take a list (Z-Image)."""
    return torch.stack(states) if isinstance(states, list) else states


def squeeze_axis(tensor: Tensor, axis: int | None) -> Tensor:
    """Remove an axis of size 1; None removes none."""
    return tensor if axis is None else tensor.squeeze(axis)


def find_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Path:
    if args and _is_states(args[0]):
        return (0, 0)
    for name in STATES:
        if _is_states(kwargs.get(name)):
            return (1, name)
    given = ", ".join(kwargs) or "none"
    raise ValueError(
        f"the network is called without a tensor of states (first argument, or {', '.join(STATES)};"
        f" its keywords are {given}); this pipeline is not supported"
    )


def _is_states(value: Any) -> bool:
    if isinstance(value, list) and value and all(isinstance(one, Tensor) for one in value):
        return len({one.shape for one in value}) == 1
    return isinstance(value, Tensor)


def get_path(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def iterate_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for name in value:
            yield from iterate_leaves(value[name], (*path, name))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from iterate_leaves(item, (*path, index))
    else:
        yield path, value


def _map_nested(change: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """Apply `change` to a nested value; a changed container is not descended into."""
    found = change(path, value) if path else value
    if found is not value:
        return found
    if isinstance(value, Mapping):
        return {name: _map_nested(change, item, (*path, name)) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map_nested(change, item, (*path, index)) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
