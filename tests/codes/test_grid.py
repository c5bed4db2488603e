"""The token layout of a grid, and its mask: for every node at once, the same as token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.codes.grid import Grid, GridMask
from mmspec.distributions.sampling import Sampling

BARE = Grid(3, 4, codes=(5, 9))
FULL = Grid(2, 3, codes=torch.tensor([4, 8, 6]), separator=9, header=(7, 2), footer=(1, 3))


def test_the_offsets_of_a_grid_with_everything() -> None:
    tokens = [FULL.forced_token(offset) for offset in range(-1, FULL.length + 2)]
    c = None
    assert tokens == [None, 7, 2, c, c, c, 9, c, c, c, 9, 1, 3, None, None]
    cells = [FULL.cell_at(offset) for offset in range(-1, FULL.length + 1)]
    row = [[(r, 0), (r, 1), (r, 2), None] for r in range(2)]
    assert cells == [None, None, None, *row[0], *row[1], None, None, None]
    assert FULL.length == 12
    assert FULL.cells == 6


@pytest.mark.parametrize("grid", [BARE, FULL], ids=["bare", "full"])
def test_offset_and_cell_are_inverse(grid: Grid) -> None:
    found = [offset for offset in range(grid.length) if grid.cell_at(offset) is not None]
    assert len(found) == grid.cells
    for offset in found:
        cell = grid.cell_at(offset)
        assert cell is not None
        assert grid.offset_of(*cell) == offset
        assert grid.forced_token(offset) is None
    assert all(
        grid.forced_token(offset) is not None for offset in set(range(grid.length)) - set(found)
    )


def test_codes_are_a_range_or_ids() -> None:
    assert BARE.ids().tolist() == [5, 6, 7, 8]
    assert FULL.ids().tolist() == [4, 8, 6]
    assert BARE.length == 12


def test_what_is_no_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="a grid of 0 x 3 has no cells"):
        Grid(0, 3, codes=(0, 4))
    with pytest.raises(ValueError, match="not a range of ids"):
        Grid(2, 3, codes=(4, 4))
    with pytest.raises(ValueError, match=r"codes has shape \(1, 2\)"):
        Grid(2, 3, codes=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"\(3, 0\) lies outside a grid of 3 x 4"):
        BARE.offset_of(3, 0)


GRIDS = (
    Grid(2, 3, (4, 9), separator=9, header=(1, 2), footer=(3,)),
    Grid(3, 2, torch.tensor([5, 2, 8])),
    Grid(1, 1, (0, 10), separator=0),
)


@pytest.mark.parametrize("grid", GRIDS, ids=range(len(GRIDS)))
def test_every_position_allows_what_the_grid_allows(grid: Grid) -> None:
    start = torch.tensor([[5], [9]])
    position = start + torch.randint(grid.length + 4, (2, 25))  # any order: nodes of a tree
    logits = torch.randn(2, 25, 10)
    scores = GridMask(grid, start)(logits, position)
    for row in range(2):
        for node in range(25):
            forced = grid.forced_token(int(position[row, node] - start[row, 0]))
            allowed = grid.ids().tolist() if forced is None else [forced]
            kept = scores[row, node].isfinite().nonzero()[:, 0].tolist()
            assert kept == sorted(allowed)
            assert torch.equal(scores[row, node, kept], logits[row, node, kept])
            assert GridMask(grid, start).forced_tokens(position)[row, node] == (
                -1 if forced is None else forced
            )


def test_a_grid_that_rules_nothing_out_hands_the_scores_on() -> None:
    scores, position = torch.randn(1, 4, 10), torch.arange(4)[None]
    start = torch.zeros(1, 1).long()
    assert GridMask(Grid(2, 2, (0, 10)), start)(scores, position) is scores
    assert GridMask(Grid(2, 2, (0, 9)), start)(scores, position) is not scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_forced_token_has_probability_one_whatever_the_settings(do_sample: bool) -> None:
    grid = Grid(2, 3, (4, 9), separator=9)
    more: dict[str, Any] = {"temperature": 0.5, "top_k": 2, "top_p": 0.5} if do_sample else {}
    sampling = Sampling(
        do_sample, position_processors=(GridMask(grid, torch.tensor([[7]])),), **more
    )
    logits = torch.randn(1, 8, 10)
    distribution = sampling.distribution(logits, position=torch.arange(7, 15)[None])
    assert (
        distribution.probs[0, 3].tolist() == distribution.probs[0, 7].tolist() == [0.0] * 9 + [1.0]
    )
    assert distribution.probs[0, [0, 1, 2, 4, 5, 6], 9].eq(0).all()


def test_position_processors_need_positions() -> None:
    sampling = Sampling(position_processors=(GridMask(Grid(1, 1, (0, 2)), torch.zeros(1, 1)),))
    with pytest.raises(ValueError, match="GridMask depends on positions"):
        sampling.distribution(torch.zeros(1, 1, 4))
