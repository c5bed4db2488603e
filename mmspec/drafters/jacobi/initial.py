"""What a Jacobi window holds where the target has said nothing yet: one guess per object.

Any guess is legal, because it is stored with a point mass as its distribution; only speed depends
on it.

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

FILL = Lane.DRAFT  # the lane of the draws made here


@dataclass(frozen=True)
class Map:
    """A grid as tensors indexed by offset; one entry more stands for everything behind it."""

    grid: Grid
    codes: Tensor  # (C,) ids that a cell may hold
    forced: Tensor  # (G + 1,) int64 forced token, -1 = none
    column: Tensor  # (G + 1,) int64, -1 = no cell
    row: Tensor  # (G + 1,) int64, -1 = no cell

    @classmethod
    def of(cls, grid: Grid, device: torch.device) -> Map:
        """Lay the grid out on a device."""
        offsets = range(grid.length + 1)
        cells = [grid.cell(offset) or (-1, -1) for offset in offsets]
        forced = [-1 if (token := grid.forced(offset)) is None else token for offset in offsets]
        rows, columns = torch.tensor(cells, device=device).unbind(-1)
        return cls(grid, grid.ids(device), torch.tensor(forced, device=device), columns, rows)


@dataclass(frozen=True)
class Frame:
    """The window to be filled: what is known of it, and where it stands."""

    context: Context
    tokens: Tensor  # (B, N) int64; what stands in new slots means nothing
    new: Tensor  # (B, N) bool, True = to be filled
    distribution: (
        Categorical  # (B, 1 + M), M <= N: of the last committed token and of slots known by a row
    )
    map: Map | None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def offsets(self) -> Tensor:  # (B, N), indices into the map
        """How many new tokens stand before each slot; all behind the grid count as one."""
        assert self.map is not None
        rows = range(self.context.batch)
        first = torch.tensor([[self.context.generated(row)] for row in rows])
        slots = torch.arange(self.width, device=self.tokens.device)
        return (first.to(slots.device) + slots).clamp_max(self.map.grid.length)


class Initialiser(Protocol):
    """Guesses the tokens of new slots."""

    def fill(self, frame: Frame) -> Tensor: ...  # (B, N), read where `frame.new` is set


@dataclass(frozen=True)
class RandomInitial:
    """A code drawn uniformly; a token of the whole vocabulary where there is no grid."""

    def fill(self, frame: Frame) -> Tensor:  # (B, N)
        index = torch.arange(frame.width, device=frame.tokens.device)
        uniform = frame.context.noise.fresh(FILL, index).uniform()
        if frame.map is None:
            return (uniform * frame.context.vocabulary).long()
        codes = frame.map.codes
        return codes[(uniform * len(codes)).long()]


@dataclass(frozen=True)
class Left:
    """The token before, within a row of the grid ("repeat horizon", Teng et al. 2025).

    Several new slots copy the same token. The first column is random; without a grid there is
    none.
    """

    def fill(self, frame: Frame) -> Tensor:  # (B, N)
        last = _tail(frame, 1)
        return _copied(frame, torch.cat((last, frame.tokens), 1), 1, _inner(frame))


@dataclass(frozen=True)
class LeftArgmax:
    """The likeliest token of the slot before, by its own distribution ("sample horizon", Teng et al. 2025).

    As `Left` otherwise: behind a new slot its guess is copied.
    """

    def fill(self, frame: Frame) -> Tensor:  # (B, N)
        best = frame.distribution.scores.argmax(-1)
        behind = frame.tokens[:, best.shape[1] - 1 :]
        return _copied(frame, torch.cat((best, behind), 1), 1, _inner(frame))


@dataclass(frozen=True)
class Above:
    """The code above in the grid; the first row is random, and without a grid everything is."""

    def fill(self, frame: Frame) -> Tensor:  # (B, N)
        if frame.map is None:
            return RandomInitial().fill(frame)
        period = frame.map.grid.period
        before = torch.cat((_tail(frame, period), frame.tokens), 1)
        return _copied(frame, before, period, frame.map.row[frame.offsets()] > 0)


@dataclass(frozen=True)
class Structural:
    """Row separators, header and footer where the grid forces them, `inner` for the codes.

    A forced token is accepted with certainty by a target that cannot say anything else, so it
    costs nothing. Without a grid this is `inner`.
    """

    inner: Initialiser = field(default_factory=RandomInitial)

    def fill(self, frame: Frame) -> Tensor:  # (B, N)
        tokens = self.inner.fill(frame)
        if frame.map is None:
            return tokens
        forced = frame.map.forced[frame.offsets()]
        return torch.where(forced >= 0, forced, tokens)


def _inner(frame: Frame) -> Tensor:  # (B, N) bool
    """Slots with a code to their left."""
    if frame.map is None:
        return torch.ones_like(frame.new)
    return frame.map.column[frame.offsets()] > 0


def _tail(frame: Frame, count: int) -> Tensor:  # (B, count)
    """The last committed tokens; rows that have fewer repeat their first."""
    rows = [[*row[:1] * (count - len(row)), *row[-count:]] for row in frame.context.history]
    return torch.tensor(rows, device=frame.tokens.device)


def _copied(frame: Frame, before: Tensor, distance: int, allowed: Tensor) -> Tensor:
    """Fill new slots where `allowed` (B, N) from `distance` places before, the others at random.

    `before` (B, distance + N) are the tokens to copy from, those before the window first. A new
    slot that copies a new slot copies what that one copies: pointers are followed to their end.

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
    "left": Left(),
    "left-argmax": LeftArgmax(),
    "above": Above(),
}


def initialiser(kit: Kit) -> Initialiser:
    """What fills new slots, by name or as an object; forced tokens are always drafted as such.

    Raises ValueError for an unknown name, and for `Above` with a model that draws no grids.
    """
    given = kit.options["initial"]
    if isinstance(given, str):
        if given not in INITIAL:
            raise ValueError(
                f"initial={given!r} is not known; choose one of {', '.join(INITIAL)}, or pass an "
                "object"
            )
        given = INITIAL[given]
    if not callable(given) and type(given).__module__ == "builtins":
        raise ValueError(f"initial={given!r} fills nothing; give one of {', '.join(INITIAL)}")
    if isinstance(given, Above) and not kit.target.family.draws:
        raise ValueError(
            "initial='above' copies the code above in a picture, but "
            f"{type(kit.target.model).__name__} draws none; give one of random, left, left-argmax"
        )
    return Structural(given)
