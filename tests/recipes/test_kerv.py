"""KERV: what completes an action, when, and what is left of it without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.codes.action_constants import ActionConstants
from mmspec.codes.episodes import Episode
from mmspec.drafters.actions.completion import EveryFew, OnRefusal
from mmspec.drafters.actions.kalman import ConstantVelocity, RandomWalk
from tests.toys.policies import SPACE, act, plain, remembering, robot


def wandering(steps: int = 12, seed: int = 0) -> Episode:
    """A robot far from what the toys say."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(30, 110, (1, SPACE.size), generator=generator)
    drift = torch.randint(-2, 3, (1, SPACE.size), generator=generator)
    return remembering(start + drift * torch.arange(steps)[:, None].clamp_max(14))


STRICT: dict[str, Any] = {"least": 0.0, "most": 0.0}  # a head that knows nothing is refused at once


def test_the_rest_of_a_refused_action_is_the_filter_s() -> None:
    """Prefill, one verified draft with its correction, then the tail by component."""
    episode = wandering()
    found, rounds = act(robot("kerv", **STRICT), [episode])
    (wanted,) = plain(1)
    assert [kept.calls for kept in rounds] == [0, 1, 0]
    assert rounds[2].is_unverified
    said = len(rounds[0].tokens[0]) + len(rounds[1].tokens[0])
    assert 2 <= said < 7
    assert found[0][:said] == wanted[:said]  # untouched
    ahead = ConstantVelocity().ahead(episode.recent(10), 1)[0].clamp(-1, 1)
    tail = SPACE.encode(torch.cat((ahead[:6], episode.actions[-1][6:])))
    assert found[0][said:] == tail[said:].tolist()
    assert len(found[0]) == 7


def test_a_completed_robot_is_locked_out() -> None:
    """Completed at step 12, then not before step 12 + 1 + 4."""
    bound, episode, completed = robot("kerv", **STRICT), wandering(), []
    for _ in range(11):
        step = episode.step
        found, rounds = act(bound, [episode])
        if any(kept.is_unverified for kept in rounds):
            completed.append(step)
        episode.observe(SPACE.decode(torch.tensor(found[0])))
    assert completed == [12, 17, 22]


def test_without_a_lockout_that_ends_it_is_spec_vla() -> None:
    near = remembering([plain(1)[0]] * 4)
    for radius in (0.0, 6.0, 40.0):
        kerv = robot("kerv", least=radius, most=radius, lockout=float("inf"))
        episodes = [wandering(), near, Episode(SPACE)]
        assert act(kerv, episodes)[0] == act(robot("spec-vla", radius=radius), episodes)[0]


def test_a_robot_that_did_too_little_is_not_completed() -> None:
    for steps in (0, 1):
        found, rounds = act(robot("kerv", **STRICT), [wandering(steps)])
        assert found == plain(1)
        assert not any(kept.is_unverified for kept in rounds)


def test_rows_are_completed_each_by_itself() -> None:
    locked = wandering()
    locked.locked_until = 99
    found, rounds = act(robot("kerv", **STRICT), [wandering(seed=1), locked, Episode(SPACE)])
    wanted = plain(3)
    assert found[1:] == wanted[1:]
    assert found[0] != wanted[0]
    skipped = [kept for kept in rounds if kept.is_unverified]
    assert [bool(row) for row in skipped[0].tokens] == [True, False, False]
    assert locked.locked_until == 99


def test_every_fourth_action_is_ended_as_released() -> None:
    bound, episode, completed = robot("kerv-release"), wandering(3), []
    for _ in range(9):
        step = episode.step
        found, rounds = act(bound, [episode])
        assert len(found[0]) == 7
        calls = sum(kept.calls for kept in rounds)
        if any(kept.is_unverified for kept in rounds):
            completed.append(step)
            assert calls == 1  # a single verified draft
        episode.observe(SPACE.decode(torch.tensor(found[0])))
    assert completed == [3, 7, 11]


def test_occasions() -> None:
    episode = wandering(7)
    assert OnRefusal().is_due(episode, True)
    assert not OnRefusal().is_due(episode, False)
    episode.locked_until = 8
    assert not OnRefusal().is_due(episode, True)
    assert EveryFew(4).is_due(episode, False)
    assert not EveryFew(3).is_due(episode, True)
    with pytest.raises(ValueError, match="period=0 must be 1"):
        EveryFew(0)


def test_the_radius_of_an_episode_moves_with_what_was_kept() -> None:
    """Through the loop: kept tokens that are off are noted, and the next radius is smaller."""
    bound, episode = robot("kerv", least=0.0, most=127.0, lockout=float("inf")), wandering()
    act(bound, [episode])
    assert episode.step_deviations
    assert max(episode.step_deviations) > 0
    episode.observe(torch.zeros(7))
    assert episode.deviations[-1] > 0
    radius = bound.verifier.radius  # type: ignore[attr-defined]
    assert radius.radius(episode) < 127


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lockout": -1.0}, "lockout=-1"),
        ({"motion": "still"}, "motion='still' is not known"),
        ({"least": 9.0, "most": 5.0}, "least=9.0 must be a number of at least 0 and at most 5"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        robot("kerv", **options)


def test_fitted_constants_are_those_of_the_file_unless_given(tmp_path: Path) -> None:
    ActionConstants(0.25, "random_walk", 10.0, 1.0).save(tmp_path)
    cases: tuple[tuple[dict[str, Any], Any, float], ...] = (
        ({}, RandomWalk(10.0, 1.0), 0.25),
        ({"motion": "constant_velocity", "reference": 2.0}, ConstantVelocity(), 2.0),
    )
    for more, motion, reference in cases:
        bound: Any = robot("kerv", constants=str(tmp_path), **more)
        assert bound.drafter.forecast == motion
        assert bound.verifier.radius.reference == reference
    usual: Any = robot("kerv")
    assert usual.drafter.forecast == ConstantVelocity()
    assert usual.verifier.radius.reference == 1
    with pytest.raises(ValueError, match=r"holds no constants of actions .*constants.json"):
        robot("kerv", constants=str(tmp_path / "none"))
