"""Cells of an image that are generated again: around rejected ones, and their connected parts.

With a reach of 1, x rejected and # generated again, these are two islands; cells that share a side
or a corner are connected.

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
    """The grid positions of draft nodes that are to be tested (`Draft.extras`)."""

    positions: Tensor  # (B, N, 2) row and column, -1 = not tested


def dilate(cells: Tensor, refused: Tensor, reach: float) -> Tensor:  # (B, N, 2), (B, N) -> (B, N)
    """The nodes within `reach` rows and columns of a rejected one, itself included.

    Nodes outside the grid, -1, are neither rejected nor near.
    """
    inside = cells[..., 0] >= 0
    distance = (cells[:, :, None] - cells[:, None]).abs().amax(-1)  # (B, N, N)
    near = (distance <= reach) & (refused & inside)[:, None]
    return inside & near.any(-1)


def find_islands(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The 8-connected parts of a set of cells, each in raster order, ordered by first cell."""
    left = set(cells)
    parts = []
    for start in sorted(left):
        if start not in left:
            continue
        left.remove(start)
        part, frontier = [start], [start]
        while frontier:
            row, column = frontier.pop()
            adjacent = {(row + y, column + x) for y in STEPS for x in STEPS} & left
            left -= adjacent
            part += adjacent
            frontier += adjacent
        parts.append(sorted(part))
    return parts


STEPS = (-1, 0, 1)
