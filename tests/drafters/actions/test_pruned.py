"""SpecPrune-VLA: which tokens stay, when a robot works finely, and what is remembered of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.compressors.action_prune import ActionPrune
from mmspec.compressors.contract import Features
from mmspec.decode import decode
from mmspec.drafters.actions.pruned import frames_back, visual_history, works_finely
from mmspec.targets.stop import Stop
from tests import toys
from tests.toys.policies import GREEDY, SPACE, act, plain, remembering, robot

COUNT = 64


def picture(seed: int = 0) -> Features:
    generator = torch.Generator().manual_seed(seed)
    return Features(torch.randn(COUNT, 8, generator=generator), torch.arange(COUNT) + 1, (8, 8))


def told(earlier: Tensor, fine: bool = False, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "attention": torch.rand(COUNT, generator=generator),
        "earlier-attention": torch.rand(COUNT, generator=generator),
        "earlier-features": earlier,
        "precision": torch.tensor([float(fine)]),
    }


def kept(compressor: ActionPrune, features: Features, signals: dict[str, Tensor]) -> set[int]:
    return set((compressor.compress(features, signals).positions - 1).tolist())


def top(scores: Tensor, count: int) -> set[int]:
    return set(scores.topk(count).indices.tolist())


def test_a_still_picture_keeps_what_is_and_was_attended_to() -> None:
    """All static (up to their share): global and local tokens, and no others."""
    seen, rule = picture(), ActionPrune(coarse=6 / 64, fine=10 / 64, static=1.0)
    for fine, count in ((False, 6), (True, 10)):
        signals = told(seen.values, fine)
        wanted = top(signals["attention"], count) | top(signals["earlier-attention"], count)
        assert kept(rule, seen, signals) == wanted
    coarse, fine_ = (kept(rule, seen, told(seen.values, fine)) for fine in (False, True))
    assert coarse < fine_


def test_what_has_moved_is_kept() -> None:
    seen, rule = picture(), ActionPrune(coarse=1 / 64, static=1.0)
    earlier = seen.values.clone()
    earlier[20:30] = -earlier[20:30]
    signals = told(earlier)
    wanted = top(signals["attention"], 1) | top(signals["earlier-attention"], 1)
    assert kept(rule, seen, signals) == wanted | set(range(20, 30))


def test_a_new_picture_is_kept_whole() -> None:
    seen = picture()
    for earlier in (torch.zeros_like(seen.values), picture(5).values):
        assert len(kept(ActionPrune(), seen, told(earlier))) == COUNT


def test_no_more_tokens_are_static_than_their_share() -> None:
    seen = picture()
    signals = told(seen.values)
    for share in (8, 32, 60):
        rule = ActionPrune(coarse=1 / 64, static=share / 64)
        assert COUNT - share <= len(kept(rule, seen, signals)) <= COUNT - share + 2


def test_at_the_first_step_nothing_was_attended_to_before() -> None:
    seen, rule = picture(), ActionPrune(coarse=6 / 64, static=1.0)
    signals = {**told(seen.values), "earlier-attention": torch.zeros(COUNT)}
    assert kept(rule, seen, signals) == top(signals["attention"], 6)


def test_a_limit_of_one_loses_nothing() -> None:
    seen = picture()
    assert len(kept(ActionPrune(limit=1.0), seen, told(seen.values))) == COUNT
    with pytest.raises(ValueError, match="limit=2 is not a cosine"):
        ActionPrune(limit=2)
    with pytest.raises(ValueError, match="keep=0"):
        ActionPrune(coarse=0)


UNIT = ActionSpace.from_statistics({"q01": [-1] * 7, "q99": [1] * 7}, ActionCodes(300, 256))


def moved(xyz: tuple[float, float, float], turn: float = 0.0, steps: int = 12) -> Episode:
    episode = Episode(UNIT)
    for _ in range(steps):
        episode.observe(torch.tensor([*xyz, turn, 0, 0, 0]))
    return episode


@pytest.mark.parametrize(
    ("xyz", "turn", "from_coarse", "from_fine"),
    [
        ((0.3, 0.0, 0.1), 0.9, True, False),  # slow; but it turns
        ((0.3, 0.0, 0.1), 0.0, True, True),
        ((0.5, 0.0, 0.0), 0.0, False, True),
        ((0.0, 0.0, 0.3), 0.0, True, False),  # slow, but up
        ((0.9, 0.0, 0.0), 0.0, False, True),
        ((0.4, 0.0, 0.3), 0.0, False, False),
        ((0.05, 0.0, 0.05), 0.1, True, True),
    ],
)
def test_when_a_robot_works_finely(
    xyz: tuple[float, float, float], turn: float, from_coarse: bool, from_fine: bool
) -> None:
    episode = moved(xyz, turn)
    assert works_finely(UNIT, episode, False) == from_coarse
    assert works_finely(UNIT, episode, True) == from_fine
    assert not works_finely(UNIT, moved(xyz, turn, 9), True)  # too early to say


def test_quick_robots_are_compared_with_newer_frames() -> None:
    back = [frames_back(UNIT, moved((speed, speed, speed))) for speed in (0.0, 0.2, 0.6, 1.0)]
    assert back == sorted(back, reverse=True)
    assert back[0] == 6
    assert frames_back(UNIT, Episode(UNIT)) == 1
    assert all(1 <= one <= 6 for one in back)


def test_a_step_is_remembered_for_the_next() -> None:
    bound, episode = robot("specprune-vla"), Episode(SPACE)
    act(bound, [episode])
    looks = visual_history(episode)
    assert looks.attention is not None
    assert len(looks.frames) == 1
    assert looks.attention.shape == looks.frames[0].shape[:1]
    for _ in range(8):
        act(bound, [episode])
    assert len(looks.frames) == 6
    episode.reset()
    assert visual_history(episode).frames == []


def test_pruned_drafts_are_only_drafts() -> None:
    """Behind frames that are the same again, in rows of different lengths: still the target's."""
    bound: Any = robot("specprune-vla")
    episodes = [remembering(torch.full((3, 7), 76)) for _ in range(3)]
    for scene in (0, 0, 0, 1):
        found, rounds = act(bound, episodes, scene=scene)
        assert found == plain(3, scene=scene)
        assert sum(map(sum, (kept.drafted for kept in rounds))) > 0


def test_a_policy_without_pictures_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM reads no images, and .* openvla-ar"):
        robot("specprune-vla", family="llama")


def test_a_prompt_without_a_picture_is_drafted_for() -> None:
    model: Any = robot("specprune-vla")
    words = toys.inputs("llama")
    call = model.call(words, GREEDY, Stop(SPACE.size), 3, shared={"episodes": [Episode(SPACE)]})
    with torch.no_grad():
        rounds = list(decode(call.parts, call.request))
    assert all(kept.fallback is None for kept in rounds)
