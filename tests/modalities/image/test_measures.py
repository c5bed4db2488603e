"""Object codes per round: background codes do not count."""

from __future__ import annotations

import pytest
import torch

from mmspec.modalities.image.measures import has_ink, ink_per_round
from mmspec.modality import RunResult
from mmspec.zoo.prompts import prompts
from mmspec.zoo.scene import Scene, Thing

CORNER = Scene((Thing("star", "red", "small", 0, 0),))
PAIR = Scene((Thing("star", "red", "small", 0, 0), Thing("ring", "blue", "large", 2, 1)))


def answer(*rounds: torch.Tensor | None) -> RunResult:
    turns = None if rounds[0] is None else torch.stack([one for one in rounds if one is not None])
    return RunResult(None, 81 * len(rounds), 81, rounds=turns)


@pytest.mark.parametrize("side", [3, 9, 12])
def test_ink_is_in_occupied_cells(side: int) -> None:
    found, across = has_ink(PAIR, side, side), side // 3
    assert int(found.sum()) == 2 * across**2
    assert bool(found[:across, :across].all())
    assert bool(found[2 * across :, across : 2 * across].all())


def test_one_code_a_round_is_one_whatever_the_order() -> None:
    shuffled = torch.randperm(81, generator=torch.Generator().manual_seed(0)).view(9, 9)
    judge = ink_per_round([CORNER, PAIR]).judge
    assert judge([answer(torch.arange(81).view(9, 9), shuffled)], {}) == [(1.0, 9.0), (1.0, 18.0)]


def test_backgrounds_in_one_round_gain_nothing() -> None:
    """All background in one round and one object code in each other round: no gain."""
    turns = torch.where(has_ink(PAIR, 9, 9), torch.arange(81).view(9, 9), 0)
    turns[0, 0] = 80
    assert 81 / len(turns.unique()) > 4
    assert ink_per_round([PAIR]).judge([answer(turns)], {}) == [(1.0, 18.0)]


def test_object_codes_of_one_round_count() -> None:
    rows = torch.arange(9)[:, None].expand(9, 9)
    assert ink_per_round([CORNER]).judge([answer(rows)], {}) == [(3.0, 3.0)]


def test_runs_without_rounds_are_not_scored() -> None:
    assert ink_per_round([CORNER]).judge([answer(None)], {}) == []


def test_batches_are_split_in_order() -> None:
    scenes = [one.scene for one in prompts(4)]
    rows = torch.arange(81).view(9, 9)
    together = ink_per_round(scenes).judge([answer(rows, rows), answer(rows, rows)], {})
    alone = [ink_per_round([scene]).judge([answer(rows)], {})[0] for scene in scenes]
    assert together == alone
