"""A robot's history: recorded in order, cleared at a reset."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import Episode, get_episodes

SPACE = ActionSpace.from_statistics({"q01": [0, 0], "q99": [1, 1]}, ActionCodes(512))


def test_actions_come_back_in_order() -> None:
    episode = Episode(SPACE)
    assert episode.step == 0
    assert episode.recent(3).shape == (0, 2)
    for at in range(4):
        episode.observe(torch.tensor([at / 10, 0.0]), torch.tensor([at]))
    assert episode.step == 4
    assert episode.recent(2)[:, 0].tolist() == pytest.approx([0.2, 0.3])
    assert episode.recent(0).shape == (0, 2)
    assert len(episode.recent(9)) == 4


def test_deviations_are_those_of_a_step() -> None:
    episode = Episode(SPACE)
    episode.step_deviations += [1.0, 3.0]
    episode.observe(torch.zeros(2))
    episode.observe(torch.zeros(2))
    assert episode.deviations == [2.0, 0.0]


def test_a_reset_clears_the_task_and_keeps_outcomes() -> None:
    episode = Episode(SPACE)
    episode.observe(torch.zeros(2), torch.zeros(1))
    episode.locked_until, episode.skips, episode.memory = 3, 2, {"a": 1}
    episode.reset(success=True)
    episode.reset()
    assert episode.space is SPACE
    assert episode.outcomes == [True]
    assert (episode.step, episode.states, episode.locked_until, episode.skips) == (0, [], 0, 0)
    assert episode.memory == {}
    assert episode.deviations == []


def test_what_cannot_have_been_carried_out() -> None:
    episode = Episode(SPACE)
    for wrong in (torch.zeros(3), torch.tensor([0.0, float("nan")])):
        with pytest.raises(ValueError, match="have 2 finite components"):
            episode.observe(wrong)
    episode.observe(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="1 states came with 1 actions"):
        episode.observe(torch.zeros(2))
    other = Episode(SPACE)
    other.observe(torch.zeros(2))
    with pytest.raises(ValueError, match="0 states came with 1 actions"):
        other.observe(torch.zeros(2), torch.zeros(1))


def test_a_call_gives_one_per_row() -> None:
    with pytest.raises(ValueError, match="the call has no episodes"):
        get_episodes(SimpleNamespace(shared={}, batch=1))
    with pytest.raises(ValueError, match="1 episodes for 2 rows"):
        get_episodes(SimpleNamespace(shared={"episodes": [Episode(SPACE)]}, batch=2))
    (found,) = get_episodes(SimpleNamespace(shared={"episodes": [Episode(SPACE)]}, batch=1))
    assert found.space is SPACE
