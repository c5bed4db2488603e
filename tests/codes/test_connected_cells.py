"""Cells generated again: neighbourhoods against a slow reference, islands by definition."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from mmspec.codes.connected_cells import Cell, dilate, find_islands


def touch(one: Cell, other: Cell) -> bool:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) <= 1


@pytest.mark.parametrize("share", [0.15, 0.4, 0.7])
def test_islands_are_the_parts_that_touch(share: float) -> None:
    """They cover the set, are in order and connected, and no two of them touch."""
    random = torch.Generator().manual_seed(1)
    for _ in range(30):
        grid = torch.rand(5, 7, generator=random) < share
        cells = [(int(row), int(column)) for row, column in grid.nonzero()]
        parts = find_islands(reversed(cells))
        assert sorted(cell for part in parts for cell in part) == cells  # disjoint, and all
        assert all(part == sorted(part) for part in parts)
        assert [part[0] for part in parts] == sorted(part[0] for part in parts)
        for one, other in combinations(parts, 2):
            assert not any(touch(a, b) for a in one for b in other)
        for part in parts:
            reached = {part[0]}
            for _ in part:
                reached |= {cell for cell in part if any(touch(cell, other) for other in reached)}
            assert reached == set(part)


def test_corners_join_and_gaps_part() -> None:
    assert find_islands([(0, 0), (1, 1), (1, 3)]) == [[(0, 0), (1, 1)], [(1, 3)]]
    assert find_islands([(0, 5), (1, 0)]) == [
        [(0, 5)],
        [(1, 0)],
    ]  # raster neighbours only
    assert find_islands([]) == []


@pytest.mark.parametrize("reach", [0, 1, 2, math.inf])
def test_neighbourhoods_are_those_of_a_slow_search(reach: float) -> None:
    random = torch.Generator().manual_seed(2)
    cells = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"), -1)
    cells = cells.view(1, 20, 2).repeat(6, 1, 1)
    cells[:, 7] = cells[:, 19] = -1  # stand nowhere
    refused = torch.rand(6, 20, generator=random) < 0.12
    refused[:, 7], refused[0] = True, False
    found = dilate(cells, refused, reach)
    for row in range(6):
        for node in range(20):
            here = cells[row, node].tolist()
            near = [
                other
                for other in range(20)
                if refused[row, other] and other not in (7, 19) and here != [-1, -1]
                if max(abs(a - b) for a, b in zip(here, cells[row, other].tolist(), strict=True))
                <= reach
            ]
            assert bool(found[row, node]) == bool(near)
    assert 0 < int(found.sum()) < found.numel()
