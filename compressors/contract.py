"""What a draft model gets of a picture: features, the slots they stand for, and their thinning.

A *slot* is an index into a row of the prompt, padding excluded. It is also the rotary position of a
1-D model, so thinning must never renumber: what is kept keeps its slot, what is merged takes the
slot of a member.

    prompt    <s>  a  [img img img img]  b  c        slots  0 1 2 3 4 5 6 7
    thinned   <s>  a  [    img     img]  b  c        slots  0 1   3   5 6 7
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mmspec.declared import declared

# What a compressor may need beside the n features of a picture. The *question* is the text behind
# the last picture of a prompt or, where there is none, all of its text: T tokens.
SIGNALS: Mapping[str, str] = {
    "attention": "(n,) the target's attention from the last prompt token, second full layer",
    "question-attention": "(n,) the target's attention from the question, mean over all layers",
    "last-layer-attention": "(n,) the target's attention from the question, last full layer",
    "cls": "(n,) attention from the class token of the vision tower that made the features",
    "text": "(T, H) embeddings of the question's tokens, beside which the features are read",
    "states": "(2, n, D) the target's hidden states of the picture: embedded, and early on",
    "question-states": "(2, T, D) the same of the question's tokens",
    "earlier-attention": "(n,) the question's attention at a robot's last step; 0 at its first",
    "earlier-features": "(n, H) what a robot's picture was some steps before; 0 where it had none",
    "precision": "(1,) 1 where a robot works finely, else 0",
}
# of them, what only the episodes of a robot tell
OF_ROBOTS = frozenset({"earlier-attention", "earlier-features", "precision"})
Grid = tuple[int, ...]  # rows, columns; of a video frames, rows, columns
Shape = tuple[int, int, int]  # frames, rows, columns


@dataclass(frozen=True)
class Features:
    """The features of one picture or video, line by line where it has a grid."""

    values: Tensor  # (n, H)
    positions: Tensor  # (n,) int64 slots, ascending
    grid: Grid | None = None

    def __post_init__(self) -> None:
        count = len(self.values)
        if self.positions.shape != (count,):
            raise ValueError(f"{count} features need {count} positions, not {self.positions.shape}")
        if self.grid is not None and (len(self.grid) not in (2, 3) or prod(self.grid) != count):
            raise ValueError(
                f"a grid of {self.grid} does not hold {count} features; give (rows, columns), "
                "(frames, rows, columns) or grid=None"
            )

    @property
    def shape(self) -> Shape:
        """Frames, rows and columns; one line where there is no grid."""
        return shape_of(len(self.values), self.grid)


def shape_of(count: int, grid: Grid | None) -> Shape:
    """Frames, rows and columns of `count` features."""
    if grid is None:
        return 1, 1, count
    frames, rows, columns = grid if len(grid) == 3 else (1, *grid)
    return frames, rows, columns


@dataclass(frozen=True)
class Compressed:
    """Fewer features, ascending by slot; `sizes` says how many originals each one stands for."""

    features: Tensor  # (m, H)
    positions: Tensor  # (m,) int64 slots of the original picture
    sizes: Tensor  # (m,) int64


class Compressor(ABC):
    """Thins one picture. It changes what is accepted, never what comes out."""

    @declared
    def needs(self) -> frozenset[str]:
        """Names out of SIGNALS."""
        return frozenset()

    @declared
    def places(self) -> str:
        """The map of positions in words: which slot a feature of the output stands at."""
        return "not said"

    @declared
    def weighted(self) -> bool:
        """Whether a feature counts as often as its size in the draft model's attention (ToMe)."""
        return False

    def count(self, features: int, grid: Grid | None = None) -> int | None:
        """How many features come out of so many; None = it depends on what they are."""
        return None

    def fitted(self, width: int, like: Tensor) -> Compressor:
        """The compressor for features (n, width), on the device and in the dtype of `like`.

        Raises ValueError for one whose parameters are missing or of another width.
        """
        return self

    @abstractmethod
    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        """The picture with fewer features; `signals` are those of `needs`."""


def keep_all(features: Features) -> Compressed:
    """The picture as it is."""
    sizes = torch.ones_like(features.positions)
    return Compressed(features.values, features.positions, sizes)


def check_needs(compressor: Compressor) -> None:
    """Refuse a compressor that needs a signal which nobody gives. Raises ValueError."""
    unknown = set(compressor.needs) - set(SIGNALS)
    if unknown:
        raise ValueError(
            f"{type(compressor).__name__} needs {', '.join(sorted(unknown))}; known signals: "
            f"{', '.join(SIGNALS)}"
        )


def pictures(
    parts: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    placeholder: int,
    grid: Callable[[int, int], Grid | None],
) -> list[list[Features]]:
    """Lay the encoder's outputs over the placeholders of a batch, per row.

    `parts` are (n, H) each, in the order of the placeholders; a part lies in one row unless the
    family joins them. `grid(index, n)` is the grid of a part; what it does not hold (the separator
    behind a clip) comes as a picture of its own. Raises ValueError where the counts differ.
    """
    slots = [[at for at, token in enumerate(row) if token == placeholder] for row in rows]
    parts = [part.flatten(0, -2) for part in parts]
    marks, features = sum(map(len, slots)), sum(map(len, parts))
    if marks != features:
        raise ValueError(
            f"the prompt has {marks} image tokens, but the encoder gave {features} features; let "
            "one processor make both"
        )
    found: list[list[Features]] = [[] for _ in rows]
    row = taken = 0
    for index, part in enumerate(parts):
        whole = grid(index, len(part))
        held = len(part) if whole is None else prod(whole)
        while len(part):
            while taken == len(slots[row]):
                row, taken = row + 1, 0
            count = min(held or len(part), len(part), len(slots[row]) - taken)
            where = torch.tensor(slots[row][taken : taken + count], device=part.device)
            shape = whole if whole is not None and count == prod(whole) else None
            found[row].append(Features(part[:count], where, shape))
            part, taken, whole, held = part[count:], taken + count, None, held - count
    return found


def compressed(
    found: Sequence[Sequence[Features]],
    compressor: Compressor | None,
    signals: Callable[[int, Features], Mapping[str, Tensor]],
) -> list[list[Compressed]]:
    """Every picture through the compressor; `signals(row, picture)` are what it needs."""
    if compressor is None:
        return [[keep_all(picture) for picture in row] for row in found]
    return [
        [compressor.compress(picture, signals(at, picture)) for picture in row]
        for at, row in enumerate(found)
    ]
