"""What a pipeline tells its networks: one recorded call, replayed for any states of any images.

A pipeline calls its network with B images at one step, each in k branches of guidance. The rows of
such a call are branch major, and so are those of a replay, whatever its states:

    recorded   negative of image 0, 1 | positive of image 0, 1
    replayed   negative of image 1, 1, 0 | positive of image 1, 1, 0      three states

What is told may change from step to step, as long as it does not depend on the states: numbers such
as timesteps, tensors with an entry per row, or anything else, which rows of a replay share only
with rows that are told the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Path = tuple[str | int, ...]  # where a value stands in (args, kwargs)

STATES = ("hidden_states", "sample")  # names of the states among a network's keywords
# Arguments that belong to places in a picture or a text, not to rows.
UNBATCHED = frozenset(("img_ids", "txt_ids", "image_rotary_emb", "rotary_emb", "video_coords"))
# Arguments of which a row may have several entries, one after the other.
PER_FRAME = frozenset(("encoder_hidden_states",))


@dataclass(frozen=True)
class Residual:
    """An argument that another network computed in the same step (ControlNet)."""

    call: int  # which call of the step
    part: int  # which tensor of its output
    branches: tuple[int | None, ...]  # the branch of that call for each of ours; None = zeros

    def of(self, computed: Sequence[Sequence[Sequence[Tensor]]]) -> Tensor:
        """Our argument, of tensors by call, part and branch."""
        parts = computed[self.call][self.part]
        empty = torch.zeros_like(parts[0])
        return torch.cat([empty if one is None else parts[one] for one in self.branches])


@dataclass(frozen=True)
class Versions:
    """Values of an argument that changes from step to step."""

    values: tuple[Any, ...]
    at: Tensor  # (N,) which of them


@dataclass(frozen=True)
class Around:
    """What a network sees beside the latents, the same in all steps: a mask, a first frame.

    The latents stand at `offset` on an axis, more channels or places of a sequence around them,
    and are shown where `seen`; elsewhere is something known.
    """

    shown: Tensor  # (rows, *E')
    axis: int
    offset: int
    size: int  # of the latents on that axis
    seen: Tensor  # (rows, *E) bool

    def __call__(self, latents: Tensor, index: Tensor) -> Tensor:  # (R, *E), (R,) -> (R, *E')
        full = self.shown[index].to(latents)
        own = full.narrow(self.axis, self.offset, self.size)
        own.copy_(torch.where(self.seen[index], latents, own))
        return full

    def without(self, output: Tensor) -> Tensor:
        """The part of an output that belongs to the latents, where there is one before them."""
        is_whole = output.shape[self.axis] == self.shown.shape[self.axis]
        if not self.offset or not is_whole:
            return output
        return output.narrow(self.axis, self.offset, self.size)


@dataclass(frozen=True)
class NetworkCall:
    """A recorded call of a network, and what of it changes from step to step."""

    name: str  # of the network, in its pipeline
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    states: Path
    told: Mapping[Path, Tensor] = field(default_factory=dict)  # (N,) each: timesteps
    varied: Mapping[Path, Versions] = field(default_factory=dict)
    residuals: Mapping[Path, Residual] = field(default_factory=dict)
    around: Around | None = None  # what the states hold beside the latents
    inserted: int | None = None  # an axis of size 1 that the states have and the latents have not

    @property
    def rows(self) -> int:
        """Rows of the recorded call: images times branches."""
        return len(at_path((self.args, self.kwargs), self.states))

    @property
    def shown(self) -> Tensor:  # (rows, *E)
        """The states of the recorded call."""
        return stacked(at_path((self.args, self.kwargs), self.states))

    @property
    def frames(self) -> int:
        """How many entries a row has of what is told to frames: a UNet sees them one by one."""
        return self.shown.shape[2] if self.name == "unet" and self.shown.dim() == 5 else 1

    @property
    def is_listed(self) -> bool:
        """Whether states come as a list, and so does what belongs to them."""
        return isinstance(at_path((self.args, self.kwargs), self.states), list)

    def completed(self, latents: Tensor, index: Tensor) -> Tensor:  # (R, *E), (R,)
        """The states to show for `latents` in the rows `index`."""
        shown = latents if self.around is None else self.around(latents, index)
        return shown if self.inserted is None else shown.unsqueeze(self.inserted)

    def flat(self, output: Tensor) -> Tensor:
        """An output for the latents alone."""
        output = squeezed(output, self.inserted)
        return output if self.around is None else self.around.without(output)

    def groups(self, step: Tensor) -> list[Tensor]:  # (R,) -> places in R
        """Rows that one call can serve: those that are told the same."""
        told = [
            one.at.to(step.device)[step]
            for path, one in self.varied.items()
            if not self._is_table(path, one)
        ]
        if not told:
            return [torch.arange(len(step), device=step.device)]
        _, group = torch.stack(told).unique(dim=1, return_inverse=True)
        return [(group == one).nonzero()[:, 0] for one in range(int(group.max()) + 1)]

    def replay(
        self,
        states: Tensor,
        index: Tensor,
        step: Tensor,
        computed: Mapping[Path, Tensor] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # (R, *E), (R,), (R,)
        """Arguments for `states` in the rows `index` of the recorded call, each at its own step.

        The steps are of one of the `groups`; `computed` are the residuals of these rows.
        """

        def changed(path: Path, value: Any) -> Any:
            if path == self.states:
                shown = states.to(self.shown.dtype)
                return list(shown.unbind(0)) if self.is_listed else shown
            if computed and path in computed:
                return computed[path]
            if path in self.told:
                return self.told[path].to(states.device)[step]
            if path in self.varied:
                return self._version(path, index, step)
            if self.is_listed and isinstance(value, list) and len(value) == self.rows:
                return [value[row] for row in index.tolist()]  # an entry for each state
            return (
                value[self._places(path, value, index)] if self._is_batched(path, value) else value
            )

        args, kwargs = _mapped(changed, (self.args, self.kwargs))
        return args, kwargs

    def _version(self, path: Path, index: Tensor, step: Tensor) -> Any:
        versions, first = self.varied[path], self.varied[path].values[0]
        at = versions.at.to(step.device)[step]
        if not self._is_table(path, versions):
            return versions.values[int(at[0])]
        at = at.repeat_interleave(self._each(path, first)).to(first.device)
        return torch.stack(versions.values)[at, self._places(path, first, index)]

    def _is_table(self, path: Path, versions: Versions) -> bool:
        """Whether rows may be told different versions in one call."""
        kinds = {one.shape if isinstance(one, Tensor) else None for one in versions.values}
        return len(kinds) == 1 and self._is_batched(path, versions.values[0])

    def _is_batched(self, path: Path, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.dim() == 0 or UNBATCHED & set(path):
            return False
        return value.shape[0] == self.rows * self._each(path, value)

    def _each(self, path: Path, value: Tensor) -> int:
        """How many entries a row has: of what is told to frames (AnimateDiff) more than one."""
        return self.frames if path[-1] in PER_FRAME and len(value) > self.rows else 1

    def _places(self, path: Path, value: Tensor, index: Tensor) -> Tensor:
        """The entries of the rows `index`, (R,) -> (R * each,)."""
        each = self._each(path, value)
        inner = torch.arange(each, device=index.device)
        return (index[:, None] * each + inner).flatten().to(value.device)


def stacked(states: Any) -> Tensor:
    """States as one tensor; some networks take them as a list (Z-Image)."""
    return torch.stack(states) if isinstance(states, list) else states


def squeezed(tensor: Tensor, axis: int | None) -> Tensor:
    """A tensor without an axis of size 1."""
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


def at_path(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for name in value:
            yield from leaves(value[name], (*path, name))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def _mapped(change: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """A nested value with its parts changed; what `change` makes of a container stands."""
    found = change(path, value) if path else value
    if found is not value:
        return found
    if isinstance(value, Mapping):
        return {name: _mapped(change, item, (*path, name)) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_mapped(change, item, (*path, index)) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
