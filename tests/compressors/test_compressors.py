"""Properties of every compressor: slots, counts, and the neutral setting."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mmspec.compressors import COMPRESSORS, describe, parse_compressor
from mmspec.compressors.average_pool import AveragePool
from mmspec.compressors.average_pool_1d import AveragePool1d
from mmspec.compressors.bipartite_merge import BipartiteMerge
from mmspec.compressors.contract import SIGNALS, Compressor, Features
from mmspec.compressors.hide_all import HideAll
from mmspec.compressors.selection import count_kept
from tests.compressors.catalogue import GRIDS, compress, neutral, random_features, usual

torch.set_num_threads(1)

AVERAGING: list[Compressor] = [
    AveragePool(2),
    AveragePool(5),
    BipartiteMerge(0.7),
    BipartiteMerge(0.1),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("compressor", usual(), ids=repr)
def test_slots_ascend_and_come_from_the_image(
    compressor: Compressor, grid: tuple[int, ...] | None
) -> None:
    features = random_features(grid)
    thin = compress(compressor, features)
    assert len(thin.features) == len(thin.positions) == len(thin.sizes) <= len(features.values)
    assert thin.features.shape[1:] == features.values.shape[1:]
    assert set(thin.positions.tolist()) <= set(features.positions.tolist())
    assert all(before <= after for before, after in pairwise(thin.positions.tolist()))
    stated = compressor.count(len(features.values), grid)
    assert stated in (None, len(thin.features))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("compressor", neutral(), ids=repr)
def test_keeping_all_changes_nothing(compressor: Compressor, grid: tuple[int, ...] | None) -> None:
    features = random_features(grid)
    thin = compress(compressor, features)
    assert_close(thin.features, features.values, rtol=0, atol=0)
    assert torch.equal(thin.positions, features.positions)
    assert thin.sizes.tolist() == [1] * len(features.values)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("compressor", AVERAGING, ids=repr)
def test_averages_keep_count_and_sum(compressor: Compressor, grid: tuple[int, ...] | None) -> None:
    features = random_features(grid)
    thin = compress(compressor, features)
    assert int(thin.sizes.sum()) == len(features.values)
    assert_close((thin.sizes[:, None] * thin.features).sum(0), features.values.sum(0))


@pytest.mark.parametrize("compressor", [*AVERAGING, AveragePool1d(0.3)], ids=repr)
def test_a_constant_image_stays_constant(compressor: Compressor) -> None:
    features = Features(torch.full((24, 3), 2.5), torch.arange(24), (4, 6))
    thin = compress(compressor, features)
    assert_close(thin.features, torch.full_like(thin.features, 2.5))


def test_every_compressor_is_described() -> None:
    for name in COMPRESSORS:
        found = describe(name)
        assert name.replace("-", "_") in type(parse_compressor(name)).__module__.split(".")
        assert found["summary"].endswith((".", ":"))
        assert found["places"] != "not specified"
        assert set(found["needs"]) <= set(SIGNALS)
        assert found["kept of 576"] is None or 0 <= found["kept of 576"] <= 576


def test_hide_all_leaves_nothing() -> None:
    assert compress(HideAll(), random_features((4, 6))).features.shape == (0, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool", "no compressor 'pool'"),
        (
            "atn-topk",
            "no compressor 'atn-topk'; did you mean 'attn-topk'? known: action-prune, attn-topk",
        ),
        (
            "attn-topk:share=0.5",
            "'share=0.5' is not a parameter of 'attn-topk'; it has keep",
        ),
        ("attn-topk:keep", "'keep' is not a parameter of 'attn-topk'; it has keep=0.5"),
        ("attn-topk:keep=half", "'keep=half' gives no float; give one, as in the default 0.5"),
        ("attn-topk:keep=0", "keep=0 is not a share of the tokens"),
        ("attn-topk:keep=1.5", "keep=1.5 is not a share of the tokens"),
        ("average-pool:stride=2.5", "'stride=2.5' gives no int; give one, as in the default 2"),
        ("identity:keep=1", "'keep=1' is not a parameter of 'identity'; it has none"),
    ],
)
def test_unknown_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        parse_compressor(text)


def test_parameters_stand_behind_the_name() -> None:
    assert (
        repr(parse_compressor("top-p-uniform:keep=0.2,mass=1")) == "TopPUniform(keep=0.2, mass=1)"
    )


@pytest.mark.parametrize(
    "name", [name for name in COMPRESSORS if "keep" in describe(name)["parameters"]]
)
@pytest.mark.parametrize("keep", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_is_above_0_and_at_most_1(name: str, keep: float) -> None:
    maker: Any = type(parse_compressor(name))
    with pytest.raises(ValueError, match=r"not a share of the tokens; give one in \(0, 1\]"):
        maker(keep=keep)


def test_a_share_leaves_at_least_one() -> None:
    assert [count_kept(0.25, count) for count in (0, 1, 2, 8, 9)] == [0, 1, 1, 2, 2]
    assert count_kept(0.1, 576) == 57  # SpecVLM: floor(m * (1 - drop_rate))
    assert [count_kept(share, 100) for share in (0.29, 0.57, 0.58)] == [29, 57, 58]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AveragePool(0),
        lambda: parse_compressor("holistic:window=2"),
        lambda: parse_compressor("holistic:relevance=0,novelty=0,complexity=0"),
        lambda: parse_compressor("similarity-prune:limit=1.5"),
        lambda: parse_compressor("temporal-redundancy:limit=-2"),
        lambda: parse_compressor("top-p-uniform:mass=1.5"),
        lambda: parse_compressor("conv:stride=0"),
        lambda: parse_compressor("resampler:queries=0"),
        lambda: parse_compressor("q-former:blocks=0"),
        lambda: parse_compressor("elastic-gate:branch=merge"),
        lambda: parse_compressor("resampler:heads=5,untrained=true").build(8, torch.zeros(1)),
        lambda: Features(torch.zeros(4, 2), torch.arange(3)),
        lambda: Features(torch.zeros(4, 2), torch.arange(4), (3, 2)),
        lambda: Features(torch.zeros(4, 2), torch.arange(4), (4,)),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"give|need|divide"):
        make()
