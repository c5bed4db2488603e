"""Drafts from a robot's past actions: exact for any history, and at the right positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmspec.codes.episodes import Episode
from mmspec.decode import decode
from mmspec.drafters.actions.history import HoldLast, forecast_tokens
from mmspec.drafters.actions.kalman import ConstantVelocity, RandomWalk
from mmspec.targets.stop import Stop
from tests.toys.policies import (
    GREEDY,
    SAMPLED,
    SPACE,
    act,
    build_prompts,
    plain,
    remembering,
    robot,
)

EXACT = ("openvla-ar", "hold-last", "kalman")


def answer(forecast: Any, episode: Episode, count: float, window: int | None = None) -> list[int]:
    """The forecast for the positions of so many actions."""
    context: Any = SimpleNamespace(request=SimpleNamespace(max_new_tokens=int(7 * count)))
    return forecast_tokens(SPACE, context, episode, forecast, window)


def noise(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(12, 140, (count, SPACE.size), generator=generator)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("actions", [1, 2])
@pytest.mark.parametrize("name", EXACT)
def test_any_history_gives_the_tokens_of_plain_decoding(
    name: str, actions: int, settings: Any
) -> None:
    wanted = plain(3, actions=actions, sampling=settings)
    near = remembering([wanted[2][:7]] * 3)
    episodes = [Episode(SPACE), remembering(noise(4)), near]
    found, rounds = act(robot(name), episodes, actions, settings)
    assert found == wanted
    if name != "openvla-ar":
        assert any(kept.accepted[2] for kept in rounds)


def test_a_robot_that_stands_still_is_asked_once() -> None:
    (wanted,) = plain(1)
    for name in ("hold-last", "kalman"):
        found, rounds = act(robot(name), [remembering([wanted] * 3)])
        assert found == [wanted]
        assert [kept.accepted[0] for kept in rounds] == [6]  # one token is the target's
        assert sum(kept.calls for kept in rounds) == 0  # the prefill aside


def test_components_are_drafted_at_their_place() -> None:
    """A history that is right in the third component alone is right nowhere else."""
    (wanted,) = plain(1)
    last = [(token + 40) % 128 + 12 for token in wanted]
    last[2] = wanted[2]
    found, rounds = act(robot("hold-last"), [remembering([last])])
    assert found == [wanted]
    said, right = 0, []
    for kept in rounds:
        right += [said + at for at in range(kept.accepted[0])]
        said += len(kept.tokens[0])
    assert right == [2]


def test_forecasts_of_two_actions_go_on() -> None:
    episode = Episode(SPACE)
    for at in range(30):
        episode.observe(torch.tensor([0.02 * at] + [0.0] * 5 + [0.5]))
    ids = torch.tensor(answer(ConstantVelocity(), episode, 2)).view(2, -1)
    values = SPACE.decode(ids)
    assert values[:, 0].tolist() == pytest.approx([0.60, 0.62], abs=2 / 127)
    assert (values[:, 6] - 0.5).abs().max() < 1 / 127
    held = answer(HoldLast(), episode, 2)
    assert held[:7] == held[7:] == SPACE.encode(episode.recent(1)[0]).tolist()
    assert answer(HoldLast(), episode, 1.5) == held  # the first half of an action is of one


def test_too_short_a_history_proposes_nothing() -> None:
    episode = Episode(SPACE)
    assert answer(HoldLast(), episode, 1) == []
    episode.observe(torch.zeros(7))
    assert answer(ConstantVelocity(), episode, 1) == []
    assert len(answer(RandomWalk(), episode, 1)) == 7


def test_a_ramp_at_the_end_of_the_scale_is_clipped() -> None:
    episode = Episode(SPACE)
    for at in range(20):
        episode.observe(torch.full((7,), at / 19).double())
    ids = answer(ConstantVelocity(), episode, 3)
    assert set(ids[:6] + ids[7:13]) == {int(SPACE.encode(torch.ones(())))}


def test_a_forecast_uses_the_last_actions_of_its_window() -> None:
    episode = Episode(SPACE)
    for value in [0.9] * 5 + [0.1, 0.2, 0.3]:
        episode.observe(torch.full((7,), value).double())
    slow = RandomWalk(process=1e-9, measurement=1.0, start=1e7)  # the mean
    for window, mean in ((1, 0.3), (3, 0.2), (None, 5.1 / 8)):
        found = SPACE.decode(torch.tensor(answer(slow, episode, 1, window)))
        assert found[:6].tolist() == pytest.approx([mean] * 6, abs=1 / 127)


def test_a_gripper_is_held() -> None:
    """It opens or closes at once, and is no ramp."""
    episode = Episode(SPACE)
    for at in range(20):
        episode.observe(torch.full((7,), at / 40).double())
    ids = torch.tensor(answer(ConstantVelocity(), episode, 2)).view(2, -1)
    last = SPACE.encode(episode.actions[-1])
    assert ids[:, 6].tolist() == [last[6]] * 2
    assert bool((ids[:, :6] < last[:6]).all())  # larger values have smaller ids


def test_a_call_without_episodes_falls_back_aloud() -> None:
    bound = robot("hold-last")
    call = bound.call(build_prompts(0, 1), GREEDY, Stop(7), 0, shared={})
    with torch.no_grad():
        rounds = list(decode(call.parts, call.request))
    assert "the call has no episodes" in str(rounds[0].fallback)


# --- filters


def test_a_constant_history_stays() -> None:
    actions = torch.full((9, 2), 0.3).double()
    for filter_ in (RandomWalk(), ConstantVelocity()):
        torch.testing.assert_close(filter_.ahead(actions, 3), actions[:3], atol=1e-12, rtol=0)


def test_the_gain_settles_at_its_closed_form() -> None:
    walk = RandomWalk()
    settled = (walk.process + (walk.process**2 + 4 * walk.process * walk.measurement) ** 0.5) / 2
    gain = settled / (settled + walk.measurement)
    assert gain == pytest.approx(0.9990, abs=5e-5)
    step = torch.cat((torch.zeros(5, 1), torch.ones(1, 1))).double()
    assert float(walk.run_filter(step)) == pytest.approx(gain, abs=1e-9)


def test_limits_of_the_random_walk() -> None:
    actions = torch.rand(12, 3, generator=torch.Generator().manual_seed(0)).double()
    last = RandomWalk(process=1e9).run_filter(actions)
    torch.testing.assert_close(last, actions[-1], atol=1e-9, rtol=0)
    mean = RandomWalk(process=1e-12, measurement=1.0, start=1e7).run_filter(actions)
    torch.testing.assert_close(mean, actions.mean(0), atol=1e-7, rtol=0)
    scaled = RandomWalk(2.0, 0.6, 4.0).run_filter(actions)  # ratios alone matter
    torch.testing.assert_close(RandomWalk(1.0, 0.3, 2.0).run_filter(actions), scaled)


def test_a_ramp_is_followed_by_velocity_and_lagged_behind_without() -> None:
    slope, walk = 0.01, RandomWalk(1.0, 0.5, 1.0)
    actions = slope * torch.arange(200).double()[:, None]
    ahead = ConstantVelocity().ahead(actions, 2)[:, 0]
    assert ahead.tolist() == pytest.approx([slope * 200, slope * 201], abs=1e-9)
    settled = (1 + (1 + 4 * 0.5) ** 0.5) / 2
    gain = settled / (settled + 0.5)
    assert float(actions[-1] - walk.run_filter(actions)) == pytest.approx(slope * (1 / gain - 1))


def test_variances_that_are_none() -> None:
    for made in (RandomWalk, ConstantVelocity):
        with pytest.raises(ValueError, match="process=0 is not a variance"):
            made(process=0)
    with pytest.raises(ValueError, match="motion='sideways' is not known"):
        robot("kalman", motion="sideways")
    with pytest.raises(ValueError, match="window=1 must be a whole number of at least 2"):
        robot("kalman", window=1)
