"""Structure by position: for every node at once, the same as asking the grid token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.codes.grid import Grid
from mmspec.codes.grid_mask import GridMask
from mmspec.distributions.sampling import Sampling

GRIDS = (
    Grid(2, 3, (4, 9), separator=9, header=(1, 2), footer=(3,)),
    Grid(3, 2, torch.tensor([5, 2, 8])),
    Grid(1, 1, (0, 10), separator=0),
)


@pytest.mark.parametrize("grid", GRIDS, ids=range(len(GRIDS)))
def test_every_place_allows_what_the_grid_says(grid: Grid) -> None:
    start = torch.tensor([[5], [9]])
    position = start + torch.randint(grid.length + 4, (2, 25))  # any order: nodes of a tree
    logits = torch.randn(2, 25, 10)
    scores = GridMask(grid, start)(logits, position)
    for row in range(2):
        for node in range(25):
            forced = grid.forced(int(position[row, node] - start[row, 0]))
            allowed = grid.ids().tolist() if forced is None else [forced]
            kept = scores[row, node].isfinite().nonzero()[:, 0].tolist()
            assert kept == sorted(allowed)
            assert torch.equal(scores[row, node, kept], logits[row, node, kept])
            assert GridMask(grid, start).forced(position)[row, node] == (
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
    sampling = Sampling(do_sample, places=(GridMask(grid, torch.tensor([[7]])),), **more)
    logits = torch.randn(1, 8, 10)
    distribution = sampling.distribution(logits, position=torch.arange(7, 15)[None])
    assert (
        distribution.probs[0, 3].tolist() == distribution.probs[0, 7].tolist() == [0.0] * 9 + [1.0]
    )
    assert distribution.probs[0, [0, 1, 2, 4, 5, 6], 9].eq(0).all()


def test_places_ask_for_positions() -> None:
    sampling = Sampling(places=(GridMask(Grid(1, 1, (0, 2)), torch.zeros(1, 1)),))
    with pytest.raises(ValueError, match="GridMask looks at positions"):
        sampling.distribution(torch.zeros(1, 1, 4))
