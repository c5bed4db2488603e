"""A grid knows what stands at every offset."""

from __future__ import annotations

import pytest
import torch

from mmspec.codes.grid import Grid

BARE = Grid(3, 4, codes=(5, 9))
FULL = Grid(2, 3, codes=torch.tensor([4, 8, 6]), separator=9, header=(7, 2), footer=(1, 3))


def test_the_offsets_of_a_grid_with_everything() -> None:
    tokens = [FULL.forced(offset) for offset in range(-1, FULL.length + 2)]
    c = None
    assert tokens == [None, 7, 2, c, c, c, 9, c, c, c, 9, 1, 3, None, None]
    cells = [FULL.cell(offset) for offset in range(-1, FULL.length + 1)]
    row = [[(r, 0), (r, 1), (r, 2), None] for r in range(2)]
    assert cells == [None, None, None, *row[0], *row[1], None, None, None]
    assert FULL.length == 12
    assert FULL.cells == 6


@pytest.mark.parametrize("grid", [BARE, FULL], ids=["bare", "full"])
def test_offset_and_cell_are_inverse(grid: Grid) -> None:
    found = [offset for offset in range(grid.length) if grid.cell(offset) is not None]
    assert len(found) == grid.cells
    for offset in found:
        cell = grid.cell(offset)
        assert cell is not None
        assert grid.offset(*cell) == offset
        assert grid.forced(offset) is None
    assert all(grid.forced(offset) is not None for offset in set(range(grid.length)) - set(found))


def test_codes_are_a_range_or_ids() -> None:
    assert BARE.ids().tolist() == [5, 6, 7, 8]
    assert FULL.ids().tolist() == [4, 8, 6]
    assert BARE.length == 12


def test_what_is_no_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="a grid of 0 x 3 has no cells"):
        Grid(0, 3, codes=(0, 4))
    with pytest.raises(ValueError, match="no range of ids"):
        Grid(2, 3, codes=(4, 4))
    with pytest.raises(ValueError, match=r"codes has shape \(1, 2\)"):
        Grid(2, 3, codes=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"\(3, 0\) lies outside a grid of 3 x 4"):
        BARE.offset(3, 0)
