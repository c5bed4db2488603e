"""Robots: histories of their own, reservations that exclude each other, and checked arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.modalities.vla.robots import Robot, Robots, parse_robots, parse_rows


def space(high: float = 1.0) -> ActionSpace:
    statistics = {"q01": [-1.0, -1.0], "q99": [high, high]}
    return ActionSpace.from_statistics(statistics, ActionCodes(64, 32))


def test_predictions_count_as_executed_until_actions_are_observed() -> None:
    robot = Robot(Episode(space()))
    robot.predicted = [torch.zeros(2), torch.ones(2)]
    robot.commit_predictions()
    assert (len(robot.episode.actions), robot.predicted) == (2, [])
    robot.predicted = [torch.zeros(2)]
    robot.observe(torch.ones(2), None)
    assert robot.is_observed
    robot.predicted = [torch.zeros(2)]
    robot.commit_predictions()
    assert len(robot.episode.actions) == 3


def test_states_come_with_each_action_or_with_none() -> None:
    robot = Robot(Episode(space()))
    robot.check(torch.zeros(3))
    robot.observe(torch.zeros(2), torch.zeros(3))
    for state, says in (
        (None, "1 states came with 1 actions"),
        (torch.zeros(4), "after states of 3"),
    ):
        with pytest.raises(ValueError, match=says):
            robot.check(state)
    robot.reset(None)
    robot.check(torch.zeros(4))


def test_a_reserved_robot_is_refused_and_others_are_free() -> None:
    robots = Robots()
    with robots.reserve([0, 2], space()) as (first, second):
        assert first is not second
        for number in (0, 2):
            with (
                pytest.raises(ValueError, match=rf"robot {number} is already being predicted"),
                robots.reserve([1, number], space()),
            ):
                pass
            with pytest.raises(ValueError, match="already being predicted"):
                robots.reset([number], [None])
        with robots.reserve([1], space()):
            pass
    with robots.reserve([0], space()) as (again,):
        assert again is first


def test_a_reservation_ends_with_an_error() -> None:
    robots = Robots()
    with pytest.raises(KeyError), robots.reserve([0], space()):
        raise KeyError
    with robots.reserve([0], space()):
        pass


def test_an_episode_keeps_its_statistics_until_the_reset() -> None:
    robots = Robots()
    with robots.reserve([0], space()) as (robot,):
        pass
    with robots.reserve([0], space(2.0)) as (other,):  # not begun: the statistics may change
        assert other.episode.space == space(2.0)
    with robots.access([0], space) as (robot,):
        robot.observe(torch.zeros(2), None)
    with (
        pytest.raises(ValueError, match=r"other action statistics; call reset\(robots=\[0\]\)"),
        robots.reserve([0], space()),
    ):
        pass
    robots.reset(None, [True])
    with robots.reserve([0], space()) as (robot,):
        assert robot.episode.actions == []


def test_outcomes_are_one_for_all_or_one_each() -> None:
    robots = Robots()
    with robots.reserve([0, 1], space()) as rows:
        pass
    robots.reset(None, [True])
    robots.reset([0, 1], [False, True])
    with pytest.raises(ValueError, match="3 entries for 2 robots"):
        robots.reset([0, 1], [True] * 3)
    assert len(rows) == 2
    assert robots.steps(5) == ()


def test_numbers_of_robots() -> None:
    assert parse_robots(None, None) == [0]
    assert parse_robots(None, 3) == [0, 1, 2]
    assert parse_robots(np.array([4, 1]), 2) == [4, 1]
    cases: list[tuple[Any, int | None, str]] = [
        ([], None, "are not numbers of robots"),
        ("01", None, "are not numbers of robots"),
        ([0, -1], None, "are not numbers of robots"),
        ([True], None, "are not numbers of robots"),
        ([1, 1], None, "names a robot twice"),
        ([0, 1], 3, "names 2 robots for 3 rows"),
    ]
    for given, count, says in cases:
        with pytest.raises(ValueError, match=says):
            parse_robots(given, count)


def test_rows_of_numbers() -> None:
    assert parse_rows("state", [1, 2], 1, None).tolist() == [[1, 2]]
    assert parse_rows("state", torch.ones(2, 3), 2, 3).dtype == torch.float64
    for values, count, width in (([1, 2], 2, None), ([[1, 2]], 1, 3), ("x", 1, None), ([], 2, 2)):
        with pytest.raises(ValueError, match=r"^state=.* give \("):
            parse_rows("state", values, count, width)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite numbers"):
            parse_rows("state", [bad], 1, None)
