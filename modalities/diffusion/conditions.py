"""What a pipeline tells its network: one recorded call, replayed for any states of any images.

A pipeline calls its network with B images at one step, each in k branches of guidance. The rows of
such a call are branch major, and so are those of a replay, whatever its states:

    recorded   negative of image 0, 1 | positive of image 0, 1
    replayed   negative of image 1, 1, 0 | positive of image 1, 1, 0      three states
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
class NetworkCall:
    """A recorded call of a network; `told` are the values that change from step to step."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    states: Path
    told: Mapping[Path, Tensor] = field(default_factory=dict)  # (N,) each: timesteps
    beside: Tensor | None = None  # (rows, *E'), shown behind the latents on an axis: a picture
    axis: int = 1

    @property
    def rows(self) -> int:
        """Rows of the recorded call: images times branches."""
        return int(self.shown.shape[0])

    @property
    def shown(self) -> Tensor:  # (rows, *E)
        """The states of the recorded call."""
        shown: Tensor = _at((self.args, self.kwargs), self.states)
        return shown

    def completed(self, latents: Tensor, index: Tensor) -> Tensor:  # (R, *E), (R,)
        """The states to show for `latents` in the rows `index`."""
        if self.beside is None:
            return latents
        return torch.cat((latents, self.beside[index].to(latents)), self.axis)

    def replay(
        self, states: Tensor, index: Tensor, step: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # (R, *E), (R,), (R,)
        """Arguments for `states` in the rows `index` of the recorded call, each at its own step."""

        def changed(path: Path, value: Any) -> Any:
            if path == self.states:
                return states.to(self.shown.dtype)
            if path in self.told:
                return self.told[path].to(states.device)[step]
            return (
                value[self._places(path, value, index)] if self._is_batched(path, value) else value
            )

        args, kwargs = _mapped(changed, (self.args, self.kwargs))
        return args, kwargs

    def _is_batched(self, path: Path, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.dim() == 0 or UNBATCHED & set(path):
            return False
        return value.shape[0] == self.rows * self._each(path, value)

    def _each(self, path: Path, value: Tensor) -> int:
        """How many entries a row has: of what is told to frames (AnimateDiff) more than one."""
        whole, left = divmod(value.shape[0], self.rows)
        return whole if path[-1] in PER_FRAME and not left else 1

    def _places(self, path: Path, value: Tensor, index: Tensor) -> Tensor:
        """The entries of the rows `index`, (R,) -> (R * each,)."""
        each = self._each(path, value)
        inner = torch.arange(each, device=index.device)
        return (index[:, None] * each + inner).flatten().to(value.device)


class Recorder:
    """Follows one call of the network through the steps of a pipeline's loop."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.first = NetworkCall(args, kwargs, _find_states(args, kwargs))
        self.told: dict[Path, list[Tensor]] = {}
        self.shown = self.first.shown  # the states of the latest step
        self.beside: Tensor | None = None  # what they hold behind the latents, if anything
        self.axis = 1
        self.steps = 1

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The same call, one step later. Raises ValueError where more than timesteps changed."""
        before = list(_leaves((self.first.args, self.first.kwargs)))
        after = list(_leaves((args, kwargs)))
        if [path for path, _ in before] != [path for path, _ in after]:
            raise _unsteady("its network other arguments")
        for (path, old), (_, new) in zip(before, after, strict=True):
            if path == self.first.states:
                continue
            if path not in self.told and not _same(old, new):
                self.told[path] = [_number(path, old)] * self.steps
            if path in self.told:
                self.told[path].append(_number(path, new))
        self.shown = _at((args, kwargs), self.first.states)
        self.steps += 1

    def shows(self, latents: Tensor) -> bool:  # (rows, *E)
        """Whether the latest states are these latents, and behind them what was there before.

        That may be a picture to start from or a mask, more channels or more places of a sequence.
        """
        sizes = list(zip(self.shown.shape, latents.shape, strict=False))
        longer = [axis for axis, (size, own) in enumerate(sizes) if size != own]
        if self.shown.dim() != latents.dim() or len(longer) > 1 or 0 in longer:
            return False
        if not longer and self.beside is not None:
            return False
        shown = self.shown
        if longer:
            axis, own = longer[0], latents.shape[longer[0]]
            if shown.shape[axis] < own:
                return False
            shown, beside = shown.tensor_split([own], axis)
            if self.beside is None and self.steps == 1:
                self.axis, self.beside = axis, beside
            if self.beside is None or not torch.equal(self.beside, beside):
                return False
        return torch.allclose(shown.float(), latents, rtol=2e-2, atol=2e-2, equal_nan=True)

    def call(self) -> NetworkCall:
        """The call, with its tables over the steps."""
        told = {path: torch.stack(values) for path, values in self.told.items()}
        return replace(self.first, told=told, beside=self.beside, axis=self.axis)


def _find_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Path:
    if args and isinstance(args[0], Tensor):
        return (0, 0)
    for name in STATES:
        if isinstance(kwargs.get(name), Tensor):
            return (1, name)
    given = ", ".join(kwargs) or "none"
    raise ValueError(
        f"the network is called without a tensor of states (first argument, or {', '.join(STATES)};"
        f" its keywords are {given}); this pipeline is not supported"
    )


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return old.shape == new.shape and old.dtype == new.dtype and torch.equal(old, new)
    return type(old) is type(new) and bool(old == new)


def _number(path: Path, value: Any) -> Tensor:  # ()
    """The one number that a changing argument holds, for all rows alike."""
    found = torch.as_tensor(value) if isinstance(value, Tensor | int | float) else None
    if found is None or found.dim() > 1 or bool((found != found.reshape(-1)[:1]).any()):
        raise _unsteady(f"{path[-1]!r} to its network, and other values of it")
    return found.reshape(-1)[0]


def _unsteady(what: str) -> ValueError:
    return ValueError(
        f"this pipeline gives {what} from step to step (as ControlNet, staged networks and guidance"
        " intervals do), but all steps of a window share one call; leave that feature out"
    )


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for name in value:
            yield from _leaves(value[name], (*path, name))
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _mapped(change: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    if isinstance(value, Mapping):
        return {name: _mapped(change, item, (*path, name)) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_mapped(change, item, (*path, index)) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return change(path, value)
