"""Scheduled radius: the released schedule, and its bounds."""

from __future__ import annotations

import itertools

import pytest

from mmspec.verifiers.scheduled_radius import SCHEDULES, ScheduledRadius
from tests.verifiers.test_action_tolerance import SPACE, context
from tests.verifiers.test_kinematic_radius import robot


@pytest.mark.parametrize(
    ("step", "radius"), [(0, 15), (20, 14.4), (40, 10.9), (60, 6.0), (80, 3.4), (220, 3), (999, 3)]
)
def test_the_released_schedule(step: int, radius: float) -> None:
    assert ScheduledRadius(SPACE).radius(step) == pytest.approx(radius, abs=0.05)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_fall_between_their_bounds(name: str) -> None:
    rule = ScheduledRadius(SPACE, SCHEDULES[name], horizon=100)
    radii = [rule.radius(step) for step in range(120)]
    assert radii[0] == 15
    assert radii[100:] == pytest.approx([3] * 20)
    assert all(more >= less for more, less in itertools.pairwise(radii))
    found = rule.limits(context([1, 1], [robot(), robot(steps=50)]))
    assert found[:, 0].tolist() == [15, radii[50]]
    assert found[:, 6].tolist() == [0, 0]
    assert ScheduledRadius(SPACE, SCHEDULES[name], 0, 0).radius(9) == 0  # exact from the start
