"""Action tokens: the table of OpenVLA, units, and errors."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from mmspec.codes.actions import ActionCodes, ActionSpace

CODES = ActionCodes(32000)
BELOW = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0))
STATISTICS: dict[str, list[Any]] = {
    "q01": [-0.02, -0.03, -0.04, -0.1, -0.2, -0.3, 0.0],
    "q99": [0.02, 0.05, 0.03, 0.1, 0.1, 0.3, 1.0],
    "mask": [True] * 6 + [False],
}


@pytest.mark.parametrize(
    ("value", "token"), [(-1, 31999), (0, 31872), (0.5, 31808), (BELOW, 31745), (1, 31744)]
)
def test_the_published_table(value: float, token: int) -> None:
    assert int(CODES.encode(torch.as_tensor(value, dtype=torch.float64))) == token


def test_encoding_is_digitize() -> None:
    values = numpy.random.default_rng(0).uniform(-1.2, 1.2, 20_000)
    edges = numpy.linspace(-1, 1, 256)
    wanted = 32000 - numpy.digitize(numpy.clip(values, -1, 1), edges)
    assert CODES.encode(torch.tensor(values)).tolist() == wanted.tolist()
    centers = (edges[:-1] + edges[1:]) / 2
    decoded = centers[numpy.clip(32000 - wanted - 1, 0, 254)]
    assert CODES.decode(torch.tensor(wanted)).tolist() == pytest.approx(decoded.tolist(), abs=1e-15)


def test_a_value_comes_back_within_half_a_bin() -> None:
    values = torch.rand(10_000, generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    there = CODES.encode(values)
    assert CODES.contains(there).all()
    assert (CODES.decode(there) - values).abs().max() <= 1 / 255 + 1e-12
    again = CODES.encode(CODES.decode(there))
    assert torch.equal(again.clamp_min(31745), there.clamp_min(31745))


def test_the_two_smallest_ids_are_one_value() -> None:
    assert CODES.decode(torch.tensor([31744, 31745])).diff() == 0
    assert CODES.decode(torch.tensor([31745, 31746])).diff() == pytest.approx(-2 / 255)


def test_only_the_last_ids_are_actions() -> None:
    ids = torch.tensor([-1, 2, 31743, 31744, 31999, 32000])
    assert CODES.contains(ids).tolist() == [False, False, False, True, True, False]


def test_units_and_mask() -> None:
    space = ActionSpace.from_statistics(STATISTICS, CODES)
    ends = space.unnormalise(torch.tensor([[-1.0] * 7, [1.0] * 7]))
    assert ends[0, :6].tolist() == pytest.approx(STATISTICS["q01"][:6])
    assert ends[1, :6].tolist() == pytest.approx(STATISTICS["q99"][:6])
    assert ends[:, 6].tolist() == [-1, 1]
    values = torch.rand(50, 7, generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    torch.testing.assert_close(space.normalise(space.unnormalise(values)), values)
    one = space.unnormalise(space.decode(torch.full((7,), 31900)))
    next_ = space.unnormalise(space.decode(torch.full((7,), 31899)))
    torch.testing.assert_close(next_ - one, space.bin_size)
    assert float(space.bin_size[1]) == pytest.approx(0.08 / 255)


def test_groups_and_strictness() -> None:
    space = ActionSpace.from_statistics(STATISTICS, CODES)
    assert space.groups == {"position": (0, 1, 2), "rotation": (3, 4, 5), "gripper": (6,)}
    assert [dim.name for dim in space.dims][3:] == ["roll", "pitch", "yaw", "gripper"]
    assert space.is_strict.tolist() == [False] * 6 + [True]
    assert space.with_strict([0]).is_strict.tolist() == [True] + [False] * 6
    four = {"q01": [-1] * 4, "q99": [1] * 4, "mask": [True, True, True, False]}
    assert ActionSpace.from_statistics(four, CODES).groups == {
        "position": (0, 1, 2),
        "gripper": (3,),
    }
    two = {"q01": [-1] * 2, "q99": [1] * 2}
    assert ActionSpace.from_statistics(two, CODES).groups == {"motion": (0, 1)}


def test_the_gripper_turns_between_two_ids() -> None:
    space = ActionSpace.from_statistics(STATISTICS, CODES)
    ids = torch.full((2, 7), 31872)
    ids[:, 6] = torch.tensor([31808, 31809])
    assert space.is_open(space.decode(ids)).tolist() == [True, False]
    with pytest.raises(ValueError, match="0 grippers"):
        ActionSpace.from_statistics({"q01": [0], "q99": [1]}, CODES).is_open(torch.zeros(1))


def test_a_component_that_never_changes() -> None:
    space = ActionSpace.from_statistics({"q01": [0.5, 0], "q99": [0.5, 1]}, CODES)
    assert space.bin_size[0] == 0
    assert space.normalise(torch.tensor([0.5, 1.0])).tolist() == [0, 1]
    assert space.unnormalise(torch.tensor([0.7, 1.0])).tolist() == [0.5, 1]


def test_components_go_round_in_chunks() -> None:
    space = ActionSpace.from_statistics(STATISTICS, CODES)
    found = space.dims_at([1, 6], torch.arange(4)[None])
    assert found.tolist() == [[1, 2, 3, 4], [6, 0, 1, 2]]


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        ({"q01": [0]}, "without q99"),
        ({"q01": [0], "q99": [1, 2]}, "1, 2 and 1 entries"),
        ({"q01": [2], "q99": [1]}, "component 0 lies between"),
        ({"q01": [0], "q99": [float("nan")]}, "component 0 lies between"),
        ({"q01": [], "q99": []}, "no components"),
    ],
)
def test_statistics_that_are_none(statistics: dict[str, list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ActionSpace.from_statistics(statistics, CODES)


def test_statistics_by_name() -> None:
    known = {"bridge": {"action": STATISTICS}}
    assert ActionSpace.from_norm_stats(known, None, CODES).size == 7
    with pytest.raises(ValueError, match=r"'libero': this policy has no .* one of bridge"):
        ActionSpace.from_norm_stats(known, "libero", CODES)
    with pytest.raises(ValueError, match="2 data sets; give unnorm_key=, one of bridge, other"):
        ActionSpace.from_norm_stats({**known, "other": {"action": STATISTICS}}, None, CODES)


def test_codes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="300 bins in a vocabulary of 256"):
        ActionCodes(256, 300)
    with pytest.raises(ValueError, match="strict component 7"):
        ActionSpace.from_statistics(STATISTICS, CODES).with_strict([7])
