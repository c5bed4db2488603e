"""What a draft model gets of a picture: features, the slots they stand for, and their thinning.

A *slot* is an index into a row of the prompt, padding excluded. It is also the rotary position of a
1-D model, so thinning must never renumber: what is kept keeps its slot, what is merged takes the
slot of a member.

    prompt    <s>  a  [img img img img]  b  c        slots  0 1 2 3 4 5 6 7
    thinned   <s>  a  [    img     img]  b  c        slots  0 1   3   5 6 7
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

SIGNALS = ("attention",)  # what a compressor may need: the target's attention
Grid = tuple[int, int]  # rows, columns


@dataclass(frozen=True)
class Features:
    """The features of one picture, row by row where it has a grid."""

    values: Tensor  # (N, H)
    positions: Tensor  # (N,) int64 slots, ascending
    grid: Grid | None = None

    def __post_init__(self) -> None:
        count = len(self.values)
        if self.positions.shape != (count,):
            raise ValueError(f"{count} features need {count} positions, not {self.positions.shape}")
        if self.grid is not None and self.grid[0] * self.grid[1] != count:
            raise ValueError(
                f"a grid of {self.grid} does not hold {count} features; give grid=None"
            )


@dataclass(frozen=True)
class Compressed:
    """Fewer features, ascending by slot; `sizes` says how many originals each one stands for."""

    features: Tensor  # (m, H)
    positions: Tensor  # (m,) int64 slots of the original picture
    sizes: Tensor  # (m,) int64


class Compressor(Protocol):
    """Thins one picture. It changes what is accepted, never what comes out."""

    needs: ClassVar[frozenset[str]]  # names out of SIGNALS

    def compress(self, features: Features, signals: Mapping[str, Tensor]) -> Compressed: ...


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
    family joins them. `grid(index, n)` is the grid of a part. Raises ValueError where the counts
    differ.
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
        while len(part):
            while taken == len(slots[row]):
                row, taken = row + 1, 0
            count = min(len(part), len(slots[row]) - taken)
            where = torch.tensor(slots[row][taken : taken + count], device=part.device)
            shape = whole if count == len(part) else None
            found[row].append(Features(part[:count], where, shape))
            part, taken, whole = part[count:], taken + count, shape
    return found


def compressed(
    found: Sequence[Sequence[Features]], compressor: Compressor | None, signals: Mapping[str, Any]
) -> list[list[Compressed]]:
    """Every picture through the compressor; `signals` are per row (slots,), without padding."""
    if compressor is None:
        return [[keep_all(picture) for picture in row] for row in found]
    return [
        [
            compressor.compress(
                picture,
                {name: signals[name][at][picture.positions] for name in compressor.needs},
            )
            for picture in row
        ]
        for at, row in enumerate(found)
    ]


COMPRESSORS: Mapping[str, tuple[str, str]] = {  # file and class; loaded when asked for
    "average-pool": ("average_pool", "AveragePool"),
    "attn-topk": ("attn_topk", "AttentionTopK"),
    "bipartite-merge": ("bipartite_merge", "BipartiteMerge"),
    "hide-all": ("hide_all", "HideAll"),
    "identity": ("identity", "Identity"),
}


def named(name: str) -> Compressor:
    """The compressor of that name, as it comes. Raises ValueError listing the known ones."""
    if name not in COMPRESSORS:
        known = ", ".join(sorted(COMPRESSORS))
        raise ValueError(f"there is no compressor {name!r}; known: {known}, or pass an object")
    file, maker = COMPRESSORS[name]
    compressor: Compressor = getattr(import_module(f"mmspec.compressors.{file}"), maker)()
    return compressor
