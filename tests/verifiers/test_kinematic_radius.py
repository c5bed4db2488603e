"""Kinematic radius: it falls with the deviations of each robot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mmspec.codes.episodes import Episode
from mmspec.draft import Draft, Kind
from mmspec.trees import Tree
from mmspec.verifiers.action_tolerance import ActionTolerance
from mmspec.verifiers.kinematic_radius import KinematicRadius
from tests.verifiers.test_action_tolerance import SPACE, context, verify


def robot(deviations: Sequence[float] = (), steps: int = 0) -> Episode:
    episode = Episode(SPACE)
    for at in range(steps):
        episode.observe(torch.full((7,), 0.1 * (at % 2)))
    episode.deviations = list(deviations)
    return episode


def test_the_kinematic_radius_falls_as_the_robot_strays() -> None:
    rule = KinematicRadius(SPACE)
    radii = [rule.radius(robot([one] * 40)) for one in (0, 0.3, 0.5, 1, 9)]
    assert radii == [15, 12, 10, 5, 5]
    halved = KinematicRadius(SPACE, reference=2.0)
    assert [halved.radius(robot([one] * 40)) for one in (0, 1, 2, 9)] == [15, 10, 5, 5]
    assert rule.variability(robot([1.0, 0.5])) == pytest.approx(0.7 * 0.3 + 0.3 * 0.5)
    strict = rule.limits(context([1], [robot()]))
    assert strict.tolist() == [[15] * 6 + [0]]


def test_what_was_kept_is_measured_by_the_robot_s_own_spread() -> None:
    rule, episode = KinematicRadius(SPACE, min_bins=5, max_bins=9), robot(steps=4)
    own, tokens = torch.full((1, 4), 30), torch.tensor([[33, 27, 45]])
    found = verify(ActionTolerance(SPACE, rule), tokens, own, [1], [episode])
    assert found.length.tolist() == [2]
    spread = float(torch.tensor([0.0, 0.1, 0.0, 0.1]).double().std())
    assert episode.step_deviations == pytest.approx([3 * 2 / 49 / spread] * 2)
    episode.observe(torch.zeros(7))
    assert episode.deviations[-1] == pytest.approx(3 * 2 / 49 / spread)
    assert rule.radius(episode) < 9
    fresh = robot()  # nothing is known of its spread: a bin is the least there is
    verify(ActionTolerance(SPACE, rule), tokens, own, [1], [fresh])
    assert fresh.step_deviations == pytest.approx([3, 3])


def test_each_accepted_token_is_compared_with_its_own_target() -> None:
    """On its path in a tree, and by the last `context` actions; a spread takes two of them."""
    rule, tree = ActionTolerance(SPACE, KinematicRadius(SPACE, context=2)), Tree((-1, -1, 1))
    draft = Draft.from_tree(tree, torch.tensor([[31, 34, 28]]), Kind.DET)
    for last, spread in ((0.1, 0.1 / 2**0.5), (0.0, 2 / 49)):
        episode = robot()
        for value in (-0.8, 0.0, last):
            episode.observe(torch.full((7,), value))
        verify(rule, draft, torch.full((1, 4), 30), [1], [episode])
        found = [4 * 2 / 49 / spread, 2 * 2 / 49 / spread]
        assert episode.step_deviations == pytest.approx(found)
    two = robot(steps=2)
    verify(rule, draft, torch.full((1, 4), 30), [1], [two])
    spread = 0.1 / 2**0.5
    assert two.step_deviations == pytest.approx([4 * 2 / 49 / spread, 2 * 2 / 49 / spread])


def test_only_a_largest_radius_below_a_bin_is_exact() -> None:
    assert KinematicRadius(SPACE, min_bins=0, max_bins=0.9).is_zero
    assert not KinematicRadius(SPACE, min_bins=0, max_bins=9).is_zero


def test_rows_have_radii_of_their_own() -> None:
    rule = ActionTolerance(SPACE, KinematicRadius(SPACE))
    own, tokens = torch.full((2, 2), 30), torch.tensor([[40], [40]])
    found = verify(rule, tokens, own, [1, 1], [robot(), robot([9.0] * 9)])
    assert found.length.tolist() == [1, 0]
