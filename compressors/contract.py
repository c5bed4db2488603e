"""The visual features of a draft model, their prompt slots, and the `Compressor` interface.

A *slot* is an index into a row of the prompt, padding excluded. It is also the rotary position of a
1-D model, so compression never renumbers: a kept feature keeps its slot, a merged one takes the
slot of a member.

    prompt      <s>  a  [img img img img]  b  c        slots  0 1 2 3 4 5 6 7
    compressed  <s>  a  [    img     img]  b  c        slots  0 1   3   5 6 7
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mmspec._attributes import default_property

# Signals that a compressor may need, for an image of n features. The *question* is the text after
# the last image of a prompt or, without an image, all of its text: T tokens.
SIGNALS: Mapping[str, str] = {
    "attention": "(n,) the target's attention from the last prompt token, second full layer",
    "question-attention": "(n,) the target's attention from the question, mean over all layers",
    "last-layer-attention": "(n,) the target's attention from the question, last full layer",
    "cls": "(n,) attention from the class token of the vision tower that made the features",
    "text": "(T, H) embeddings of the question's tokens, in the space of the features",
    "states": "(2, n, D) the target's hidden states of the image: embedded, and after early layers",
    "question-states": "(2, T, D) the same of the question's tokens",
    "earlier-attention": "(n,) the question's attention at a robot's last step; 0 at its first",
    "earlier-features": "(n, H) features of a robot's image some steps before; 0 without one",
    "precision": "(1,) 1 during precise motion of a robot, else 0",
}
# signals from the episodes of a robot
OF_ROBOTS = frozenset({"earlier-attention", "earlier-features", "precision"})
# of `Context.shared`, in traces: a list that receives images and what was left of them
KEPT = "kept"
Grid = tuple[int, ...]  # rows, columns; for a video frames, rows, columns
Shape = tuple[int, int, int]  # frames, rows, columns


@dataclass(frozen=True)
class Features:
    """The features of one image or video, in raster order if it has a grid."""

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
        """Frames, rows and columns; one row without a grid."""
        return shape_of(len(self.values), self.grid)


def shape_of(count: int, grid: Grid | None) -> Shape:
    """Frames, rows and columns of `count` features."""
    if grid is None:
        return 1, 1, count
    frames, rows, columns = grid if len(grid) == 3 else (1, *grid)
    return frames, rows, columns


@dataclass(frozen=True)
class Compressed:
    """Fewer features, ascending by slot; `sizes` is the number of originals of each."""

    features: Tensor  # (m, H)
    positions: Tensor  # (m,) int64 slots of the original image
    sizes: Tensor  # (m,) int64


class Compressor(ABC):
    """Compresses one image. It changes the acceptance, never the output distribution."""

    @default_property
    def needs(self) -> frozenset[str]:
        """Names of required SIGNALS."""
        return frozenset()

    @default_property
    def position_rule(self) -> str:
        """A description of the slot that an output feature takes."""
        return "not specified"

    @default_property
    def weighted(self) -> bool:
        """Whether the draft model's attention weights a feature by its size (ToMe)."""
        return False

    def count(self, features: int, grid: Grid | None = None) -> int | None:
        """The number of output features; None = it depends on the features."""
        return None

    def build(self, width: int, like: Tensor) -> Compressor:
        """The compressor for features (n, width), on the device and in the dtype of `like`.

        Raises ValueError if trained parameters are missing or have another width.
        """
        return self

    @abstractmethod
    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed:
        """Compress the features; `signals` are those of `needs`."""


def keep_all(features: Features) -> Compressed:
    """Keep all features."""
    sizes = torch.ones_like(features.positions)
    return Compressed(features.values, features.positions, sizes)


def check_needs(compressor: Compressor) -> None:
    """Check that all required signals exist. Raises ValueError otherwise."""
    unknown = set(compressor.needs) - set(SIGNALS)
    if unknown:
        raise ValueError(
            f"{type(compressor).__name__} needs {', '.join(sorted(unknown))}; known signals: "
            f"{', '.join(SIGNALS)}"
        )


def split_features(
    parts: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    placeholder: int,
    grid: Callable[[int, int], Grid | None],
) -> list[list[Features]]:
    """Assign the encoder outputs to the placeholders of a batch, per row.

    `parts` are (n, H) each, in the order of the placeholders; a part lies in one row unless the
    model family joins them. `grid(index, n)` is the grid of a part; the rest of a part beyond its
    grid (the separator after a clip) becomes an image of its own. Raises ValueError where the
    counts differ.
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


def compress_images(
    found: Sequence[Sequence[Features]],
    compressor: Compressor | None,
    signals: Callable[[int, Features], Mapping[str, Tensor]],
) -> list[list[Compressed]]:
    """Compress every image; `signals(row, image)` are its signals."""
    if compressor is None:
        return [[keep_all(image) for image in row] for row in found]
    return [
        [compressor.compress(image, signals(at, image)) for image in row]
        for at, row in enumerate(found)
    ]
