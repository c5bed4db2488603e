"""Invariants of every compressor, and what each one is known for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.compressors import (
    AttentionTopK,
    AveragePool,
    BipartiteMerge,
    HideAll,
    Identity,
    named,
)
from mmspec.compressors.contract import COMPRESSORS, Compressed, Compressor, Features

torch.set_num_threads(1)

AVERAGING: list[Compressor] = [
    Identity(),
    AveragePool(1),
    AveragePool(2),
    AveragePool(5),
    BipartiteMerge(1.0),
    BipartiteMerge(0.7),
    BipartiteMerge(0.5),
    BipartiteMerge(0.1),
]
ALL: list[Compressor] = [*AVERAGING, HideAll(), AttentionTopK(0.5), AttentionTopK(0.01)]
NEUTRAL: list[Compressor] = [Identity(), AveragePool(1), BipartiteMerge(1.0), AttentionTopK(1.0)]
GRIDS = [(4, 6), (5, 3), (1, 1), None]


def picture(grid: tuple[int, int] | None, width: int = 8) -> Features:
    """A random picture whose slots have a gap, as between the lines of Pixtral."""
    count = 21 if grid is None else grid[0] * grid[1]
    slots = 7 + torch.arange(count) + (torch.arange(count) >= count // 2)
    return Features(torch.randn(count, width), slots, grid)


def attention(count: int) -> dict[str, Tensor]:
    return {"attention": torch.rand(count)}


def compress(compressor: Compressor, features: Features) -> Compressed:
    return compressor.compress(features, attention(len(features.values)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_slots_ascend_and_come_from_the_picture(
    compressor: Compressor, grid: tuple[int, int] | None
) -> None:
    features = picture(grid)
    thin = compress(compressor, features)
    assert len(thin.features) == len(thin.positions) == len(thin.sizes) <= len(features.values)
    assert thin.features.shape[1:] == features.values.shape[1:]
    assert set(thin.positions.tolist()) <= set(features.positions.tolist())
    assert all(before <= after for before, after in pairwise(thin.positions.tolist()))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("compressor", AVERAGING, ids=repr)
def test_averages_keep_count_and_sum(compressor: Compressor, grid: tuple[int, int] | None) -> None:
    features = picture(grid)
    thin = compress(compressor, features)
    assert int(thin.sizes.sum()) == len(features.values)
    assert_close((thin.sizes[:, None] * thin.features).sum(0), features.values.sum(0))


@pytest.mark.parametrize("compressor", AVERAGING, ids=repr)
def test_a_constant_picture_stays_constant(compressor: Compressor) -> None:
    features = Features(torch.full((24, 3), 2.5), torch.arange(24), (4, 6))
    thin = compress(compressor, features)
    assert_close(thin.features, torch.full_like(thin.features, 2.5))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("compressor", NEUTRAL, ids=repr)
def test_the_neutral_value_changes_nothing(
    compressor: Compressor, grid: tuple[int, int] | None
) -> None:
    features = picture(grid)
    thin = compress(compressor, features)
    assert_close(thin.features, features.values, rtol=0, atol=0)
    assert torch.equal(thin.positions, features.positions)


def test_pooling_means_over_cells_of_the_grid() -> None:
    values = torch.arange(24.0)[:, None]
    thin = compress(AveragePool(2), Features(values, torch.arange(24), (4, 6)))
    assert thin.features[:, 0].tolist() == [3.5, 5.5, 7.5, 15.5, 17.5, 19.5]
    assert thin.positions.tolist() == [0, 2, 4, 12, 14, 16]  # the upper left of each centre
    assert len(compress(AveragePool(2), picture((24, 24))).features) == 144  # IbED


def test_pooling_without_a_grid_means_over_runs() -> None:
    thin = compress(AveragePool(2), Features(torch.arange(6.0)[:, None], torch.arange(6)))
    assert thin.features[:, 0].tolist() == [1.5, 4.5]
    assert thin.sizes.tolist() == [4, 2]


def test_attention_keeps_the_highest_in_order() -> None:
    features = picture(None)
    signal = torch.rand(21)
    thin = AttentionTopK(0.3).compress(features, {"attention": signal})
    best = sorted(signal.topk(6).indices.tolist())
    assert thin.positions.tolist() == features.positions[best].tolist()


def test_merging_joins_what_is_alike() -> None:
    values = torch.tensor([[1.0, 0], [0, 1], [1, 0.01], [0.02, 1], [-1, -1], [5, -5]])
    thin = compress(BipartiteMerge(5 / 6), Features(values, torch.arange(6)))
    assert sorted(thin.sizes.tolist()) == [1, 1, 1, 1, 2]
    assert len(compress(BipartiteMerge(0.25), picture((24, 24))).features) == 144


def test_hide_all_leaves_nothing() -> None:
    assert compress(HideAll(), picture((4, 6))).features.shape == (0, 8)


def test_names_build_their_compressor() -> None:
    for name in COMPRESSORS:
        assert type(named(name)).__name__ == COMPRESSORS[name][1]
    with pytest.raises(ValueError, match="no compressor 'pool'; known: attn-topk, average-pool"):
        named("pool")


@pytest.mark.parametrize(
    "make",
    [
        lambda: AveragePool(0),
        lambda: AttentionTopK(0.0),
        lambda: BipartiteMerge(1.5),
        lambda: Features(torch.zeros(4, 2), torch.arange(3)),
        lambda: Features(torch.zeros(4, 2), torch.arange(4), (3, 2)),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"give|need"):
        make()
