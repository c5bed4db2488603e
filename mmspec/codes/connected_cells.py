"""Cells of a picture that are drawn anew: what was refused, what lies around it, its islands.

With a reach of 1, x being refused and # drawn anew, these are two islands; parts that touch at a
side or a corner are one.

    . . . . . . . . .        . # # # . . . . .
    . . x . . . . . .        . # # # . . . . .
    . . . . . . . . .        . # # # . . # # #
    . . . . . . . x .        . . . . . . # # #
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

Cell = tuple[int, int]  # row, column


@dataclass(frozen=True)
class Cells:
    """Where the nodes of a draft stand that are yet to be judged; it goes into `Draft.extras`."""

    places: Tensor  # (B, N, 2) row and column, -1 = settled


def around(cells: Tensor, refused: Tensor, reach: float) -> Tensor:  # (B, N, 2), (B, N) -> (B, N)
    """Which nodes lie within `reach` rows and columns of a refused one, itself included.

    Nodes outside the grid, -1, are neither refused nor near.
    """
    inside = cells[..., 0] >= 0
    distance = (cells[:, :, None] - cells[:, None]).abs().amax(-1)  # (B, N, N)
    near = (distance <= reach) & (refused & inside)[:, None]
    return inside & near.any(-1)


def islands(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The 8-connected parts of a set of cells, each in raster order, first cells first."""
    left = set(cells)
    parts = []
    for start in sorted(left):
        if start not in left:
            continue
        left.remove(start)
        part, frontier = [start], [start]
        while frontier:
            row, column = frontier.pop()
            beside = {(row + down, column + aside) for down in STEPS for aside in STEPS} & left
            left -= beside
            part += beside
            frontier += beside
        parts.append(sorted(part))
    return parts


STEPS = (-1, 0, 1)
