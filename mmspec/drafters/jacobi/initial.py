"""Initial tokens of new Jacobi slots: one policy per class.

Any guess is valid, because it is stored with a point mass as its distribution; it affects speed
only.

Letters: B batch rows, N window slots, V vocabulary, G tokens of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Lane
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context

FILL = Lane.DRAFT  # noise lane of these draws


@dataclass(frozen=True)
class GridMap:
    """A grid as tensors indexed by offset; one extra entry covers all offsets after the grid."""

    grid: Grid
    codes: Tensor  # (C,) ids that a cell may hold
    forced: Tensor  # (G + 1,) int64 forced token, -1 = none
    column: Tensor  # (G + 1,) int64, -1 = no cell
    row: Tensor  # (G + 1,) int64, -1 = no cell

    @classmethod
    def of(cls, grid: Grid, device: torch.device) -> GridMap:
        """Tabulate the grid on a device."""
        offsets = range(grid.length + 1)
        cells = [grid.cell_at(offset) or (-1, -1) for offset in offsets]
        forced = [
            -1 if (token := grid.forced_token(offset)) is None else token for offset in offsets
        ]
        rows, columns = torch.tensor(cells, device=device).unbind(-1)
        return cls(grid, grid.ids(device), torch.tensor(forced, device=device), columns, rows)


@dataclass(frozen=True)
class WindowFrame:
    """The window to fill: its known slots and its position."""

    context: Context
    tokens: Tensor  # (B, N) int64; undefined in new slots
    new: Tensor  # (B, N) bool, True = to fill
    distribution: (
        Categorical  # (B, 1 + M), M <= N: of the last committed token and of slots known by a row
    )
    map: GridMap | None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def offsets(self) -> Tensor:  # (B, N), indices into the map
        """Number of new tokens before each slot, capped at the length of the grid."""
        assert self.map is not None
        rows = range(self.context.batch)
        first = torch.tensor([[self.context.num_generated(row)] for row in rows])
        slots = torch.arange(self.width, device=self.tokens.device)
        return (first.to(slots.device) + slots).clamp_max(self.map.grid.length)


class Initialiser(Protocol):
    """Guesses the tokens of new slots."""

    def fill(self, frame: WindowFrame) -> Tensor: ...  # (B, N), read where `frame.new` is set


@dataclass(frozen=True)
class RandomInitial:
    """A uniformly random code; without a grid, a random token of the whole vocabulary."""

    def fill(self, frame: WindowFrame) -> Tensor:  # (B, N)
        index = torch.arange(frame.width, device=frame.tokens.device)
        uniform = frame.context.noise.fresh_keys(FILL, index).uniform()
        if frame.map is None:
            return (uniform * frame.context.vocabulary).long()
        codes = frame.map.codes
        return codes[(uniform * len(codes)).long()]


@dataclass(frozen=True)
class LeftInitial:
    """The previous token, within a row of the grid ("repeat horizon", Teng et al. 2025).

    Consecutive new slots copy the same token. The first column is random; without a grid there is
    no first column.
    """

    def fill(self, frame: WindowFrame) -> Tensor:  # (B, N)
        last = _tail(frame, 1)
        return _copy_tokens(frame, torch.cat((last, frame.tokens), 1), 1, _inner(frame))


@dataclass(frozen=True)
class LeftArgmaxInitial:
    """The most probable token of the previous slot ("sample horizon", Teng et al. 2025).

    Otherwise as `LeftInitial`: after a new slot its guess is copied.
    """

    def fill(self, frame: WindowFrame) -> Tensor:  # (B, N)
        best = frame.distribution.scores.argmax(-1)
        rest = frame.tokens[:, best.shape[1] - 1 :]
        return _copy_tokens(frame, torch.cat((best, rest), 1), 1, _inner(frame))


@dataclass(frozen=True)
class AboveInitial:
    """The code above in the grid; the first row is random, and everything is without a grid."""

    def fill(self, frame: WindowFrame) -> Tensor:  # (B, N)
        if frame.map is None:
            return RandomInitial().fill(frame)
        period = frame.map.grid.period
        before = torch.cat((_tail(frame, period), frame.tokens), 1)
        return _copy_tokens(frame, before, period, frame.map.row[frame.offsets()] > 0)


@dataclass(frozen=True)
class StructuralInitial:
    """Row separators, header and footer where the grid forces them, `inner` for the codes.

    A target that can generate nothing else accepts a forced token with certainty. Without a grid
    this is `inner`.
    """

    inner: Initialiser = field(default_factory=RandomInitial)

    def fill(self, frame: WindowFrame) -> Tensor:  # (B, N)
        tokens = self.inner.fill(frame)
        if frame.map is None:
            return tokens
        forced = frame.map.forced[frame.offsets()]
        return torch.where(forced >= 0, forced, tokens)


def _inner(frame: WindowFrame) -> Tensor:  # (B, N) bool
    """Slots with a code to their left."""
    if frame.map is None:
        return torch.ones_like(frame.new)
    return frame.map.column[frame.offsets()] > 0


def _tail(frame: WindowFrame, count: int) -> Tensor:  # (B, count)
    """The last committed tokens; rows with fewer repeat their first."""
    rows = [[*row[:1] * (count - len(row)), *row[-count:]] for row in frame.context.history]
    return torch.tensor(rows, device=frame.tokens.device)


def _copy_tokens(frame: WindowFrame, before: Tensor, distance: int, allowed: Tensor) -> Tensor:
    """Fill new slots where `allowed` (B, N) from `distance` positions before, the others at random.

    `before` (B, distance + N) are the tokens to copy from, starting before the window. A new slot
    that copies a new slot copies its source: pointers are followed to their end.

        distance 1, slots 1..3 new:   before   a  b  .  .  .      pointer  0 1 1 2 3
                                      slot        0  1  2  3      in turn  0 1 1 1 1  (all copy b)
    """
    copies = frame.new & allowed
    filled = torch.where(frame.new & ~allowed, RandomInitial().fill(frame), before[:, distance:])
    before = torch.cat((before[:, :distance], filled), 1)
    place = torch.arange(before.shape[1], device=before.device).expand_as(before)
    jump = torch.cat((torch.zeros_like(copies[:, :1]).expand(-1, distance), copies), 1)
    pointer = place - distance * jump
    for _ in range(max(frame.width, 1).bit_length()):
        pointer = pointer.gather(1, pointer)
    return before.gather(1, pointer)[:, distance:]


INITIAL: Mapping[str, Initialiser] = {
    "random": RandomInitial(),
    "left": LeftInitial(),
    "left-argmax": LeftArgmaxInitial(),
    "above": AboveInitial(),
}


def initialiser(kit: Kit) -> Initialiser:
    """The policy of the option `initial`, by name or as an object, after forced tokens.

    Raises ValueError for an unknown name, and for `AboveInitial` with a model without image grids.
    """
    value = kit.options["initial"]
    if isinstance(value, str):
        if value not in INITIAL:
            raise ValueError(
                f"initial={value!r} is not known; choose one of {', '.join(INITIAL)}, or pass an "
                "object"
            )
        value = INITIAL[value]
    if not callable(value) and type(value).__module__ == "builtins":
        raise ValueError(
            f"initial={value!r} is not an initialiser; give one of {', '.join(INITIAL)}"
        )
    if isinstance(value, AboveInitial) and not kit.target.family.draws_images:
        raise ValueError(
            "initial='above' copies the code above in an image, but "
            f"{type(kit.target.model).__name__} generates none; give random, left or left-argmax"
        )
    return StructuralInitial(value)
