"""The closed forms on the line of two means, against sums over a fine grid."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.verifiers.gaussian_steps import draw_on_line, line_excess

GRID = torch.linspace(-14, 20, 680_001, dtype=torch.float64)
CASES = [(0.3, 1.0), (1.0, 1.0), (1.0, 0.4), (3.0, 0.9), (2.0, 0.01), (8.0, 1.0)]


def excess_on_grid(r: float, w: float) -> Tensor:
    """(w phi(s - r) - phi(s))+ on the grid, times its step."""
    phi = [(-((GRID - at) ** 2) / 2).exp() / math.sqrt(2 * math.pi) for at in (r, 0.0)]
    return (w * phi[0] - phi[1]).clamp_min(0) * (GRID[1] - GRID[0])


@pytest.mark.parametrize(("r", "w"), CASES)
def test_the_excess_is_the_area(r: float, w: float) -> None:
    found = line_excess(*torch.tensor([r, w], dtype=torch.float64))
    assert_close(found, excess_on_grid(r, w).sum(), atol=1e-8, rtol=0)


@pytest.mark.parametrize(("r", "w"), CASES)
def test_draws_split_the_area_at_their_share(r: float, w: float) -> None:
    share = torch.tensor([1e-9, 0.01, 0.3, 0.5, 0.9, 1 - 1e-9], dtype=torch.float64)
    place = draw_on_line(torch.tensor(r).double(), torch.tensor(w).double(), share)
    area = excess_on_grid(r, w)
    for at, expected in zip(place, share, strict=True):
        beyond = area[at < GRID].sum() / area.sum()
        assert_close(beyond, expected, atol=2e-4, rtol=0)
    assert bool((place.diff() < 0).all())


def test_equal_distributions_and_weight_nothing_leave_nothing_over() -> None:
    r, w = torch.tensor([[0.0, 1.0], [0.0, 0.3], [1.0, 0.0], [0.0, 0.0]]).double().unbind(-1)
    assert line_excess(r, w).tolist() == [0.0] * 4
