"""`predict_action` says what `generate()` says, whoever asks, and remembers what was done."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

import mmspec
from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.draft import Draft, Drafter, Kind
from mmspec.modalities.vla.spaces import action_codes
from mmspec.modalities.vla.step_stats import ActionStats
from mmspec.models.prismatic_processor import EMPTY, PrismaticProcessor
from tests.modalities.vla.policies import SIZE, fast, picture, policy, processor
from tests.models.test_prismatic_processor import words as llama_words
from tests.toys import prismatic
from tests.toys.prismatic import SPAN

WORDS = "reach the red cube"
LONGER = "reach the red cube the robot should take"


def space() -> ActionSpace:
    return ActionSpace.from_statistics(SPAN, action_codes(policy().config))


def own(image: Any, words: str) -> np.ndarray:
    """By `generate()` alone: the greedy tokens among the action ids, in the robot's units."""
    made = processor().instruct([words], [[Image.fromarray(image)]])
    codes, ids = space().codes, made["input_ids"]
    actions = [one for one in range(codes.first, codes.vocabulary)]
    said = policy().generate(
        **made,
        max_new_tokens=SIZE,
        do_sample=False,
        prefix_allowed_tokens_fn=lambda row, before: actions,
    )
    tokens = said[0, -SIZE:]
    assert said.shape[1] >= ids.shape[1] + SIZE
    return space().unnormalise(space().decode(tokens)).numpy()


@dataclass(frozen=True)
class WatchingDrafter(Drafter):
    """Proposes nothing, and notes what the robots had done when an action was asked for."""

    seen: list[list[Episode]] = field(default_factory=list)
    done: list[list[int]] = field(default_factory=list)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def begin(self, context: Any) -> None:
        episodes: Sequence[Episode] = context.shared["episodes"]
        self.seen.append(list(episodes))
        self.done.append([one.step for one in episodes])

    def propose(self, context: Any, state: Any) -> Draft:
        draft: Draft = context.empty_draft()
        return draft


def stats_of(ours: mmspec.Accelerated) -> ActionStats:
    """The statistics of the last call."""
    assert isinstance(ours.last_stats, ActionStats)
    return ours.last_stats


def watched_policy() -> tuple[mmspec.Accelerated, WatchingDrafter]:
    watcher = WatchingDrafter()
    return fast("plain", drafter=watcher), watcher


@pytest.mark.parametrize("recipe", ["plain", "prompt-lookup", "suffix"])
def test_an_action_is_what_generate_says(recipe: str) -> None:
    ours = fast(recipe)
    for seed, words in enumerate((WORDS, LONGER)):
        found = ours.predict_action(picture(seed), words)
        assert found.shape == (SIZE,)
        assert np.array_equal(found, own(picture(seed), words))
    assert not np.array_equal(own(picture(0), WORDS), own(picture(1), WORDS))


def test_robots_of_a_batch_are_asked_as_if_alone() -> None:
    ours, images = fast(), [picture(seed) for seed in range(3)]
    words = [LONGER, WORDS, "Reach!"]
    together = ours.predict_action(images, words)
    assert together.shape == (3, SIZE)
    for row in range(3):
        assert np.array_equal(together[row], ours.predict_action(images[row], words[row]))
    left = ours.predict_action(images[::2], words[::2], robots=[0, 2])
    assert np.array_equal(left, together[::2])
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    ours.reset()
    every = ours.predict_action(images, words, **drawn)
    ours.reset()
    assert np.array_equal(
        ours.predict_action(images[2:], words[2:], robots=[2], **drawn), every[2:]
    )
    ours.reset()
    plain = fast("plain").predict_action(images, words, **drawn)
    assert np.array_equal(plain, every)
    assert not np.array_equal(every, together)


def test_the_noise_of_a_robot_moves_on_with_its_questions() -> None:
    ours, drawn = fast("plain"), {"temperature": 1.0, "seed": 5}
    first, second = (ours.predict_action(picture(), WORDS, **drawn) for _ in range(2))
    assert not np.array_equal(first, second)
    ours.reset()
    assert np.array_equal(ours.predict_action(picture(), WORDS, **drawn), first)


def test_what_a_camera_may_do() -> None:
    ours = fast()
    image = picture()
    same = ours.predict_action(image, WORDS)
    assert np.array_equal(same, ours.predict_action(image, WORDS))  # a dropped frame
    as_pil, as_tensor = Image.fromarray(image), torch.from_numpy(image)
    for other in (as_pil, as_tensor, as_pil.convert("RGBA")):
        assert np.array_equal(same, ours.predict_action(other, WORDS))
    larger = ours.predict_action(picture(0, 96, 160), WORDS)
    assert np.array_equal(larger, own(picture(0, 96, 160), WORDS))
    changed = ours.predict_action(image, LONGER)  # in the middle of an episode
    assert np.array_equal(changed, own(image, LONGER))
    both = ours.predict_action([image, picture(1)], WORDS)
    assert both.shape == (SIZE,)
    assert not np.array_equal(both, same)
    pair = ours.predict_action([[image, picture(1)], [picture(1), image]], [WORDS, LONGER])
    assert np.array_equal(pair[0], both)


def test_tensors_of_the_processor_are_taken_as_openvla_takes_them() -> None:
    made = dict(processor().instruct([WORDS], [[Image.fromarray(picture())]]))
    found = fast().predict_action(**made, unnorm_key="toy", do_sample=False)
    assert np.array_equal(found, own(picture(), WORDS))
    public = {**made, "input_ids": made["input_ids"][:, :1]}  # without ids of the picture
    public["attention_mask"] = torch.ones_like(public["input_ids"])
    assert fast().predict_action(**public).shape == (SIZE,)
    assert fast().predict_action(**made, robots=[4]).shape == (1, SIZE)


def test_prompts_of_a_public_processor_end_as_openvla_was_trained() -> None:
    """With Llama's empty token, which OpenVLA's own `predict_action` puts there."""
    text = prismatic.text_config(vocab_size=32064, hidden_size=16, num_key_value_heads=4)
    model = prismatic.openvla(text_config=text, pad_token_id=32000)
    reads = PrismaticProcessor.of(model, llama_words(31000, empty=True))
    ours = mmspec.accelerate(model, "plain", processor=reads)
    expected = ours.predict_action(picture(), WORDS)
    asked, shown = reads.prompt.format(instruction=WORDS), Image.fromarray(picture())
    public = dict(reads(asked, shown))
    assert public["input_ids"][0, -1] != EMPTY[0]
    assert np.array_equal(ours.predict_action(**public, do_sample=False), expected)
    assert np.array_equal(ours.predict_action(**reads.instruct(WORDS, shown)), expected)
    pair = dict(reads([asked, asked.replace("red ", "")], [shown, shown]))
    both = ours.predict_action(**pair)
    assert np.array_equal(both[0], expected)
    assert np.array_equal(both[1], ours.predict_action(picture(), WORDS.replace("red ", "")))


def test_what_was_predicted_counts_as_done_until_somebody_tells_better() -> None:
    ours, watcher = watched_policy()
    for _ in range(3):
        ours.predict_action(picture(), WORDS)
    assert watcher.done == [[0], [1], [2]]
    done = watcher.seen[0][0]
    wanted = space().normalise(torch.from_numpy(own(picture(), WORDS)))
    assert torch.allclose(done.actions[1], wanted)
    ours.reset()
    ours.predict_action(picture(), WORDS)
    ours.observe(np.full(SIZE, -0.25), np.zeros(4))
    ours.predict_action(picture(), WORDS)  # never carried out
    ours.predict_action(picture(), WORDS)
    assert watcher.done[3:] == [[0], [1], [1]]
    told = space().normalise(torch.full((SIZE,), -0.25, dtype=torch.float64))
    assert torch.equal(watcher.seen[-1][0].actions[0], told)
    assert watcher.seen[-1][0].states[0].tolist() == [0.0] * 4


def test_a_log_is_replayed_without_a_question() -> None:
    ours, watcher = watched_policy()
    log = np.random.default_rng(0).uniform(-0.4, 0.2, (5, SIZE))
    for action in log:
        ours.observe(action, state=action[:3])
    assert ours.steps() == ()
    ours.predict_action(picture(), WORDS)
    assert watcher.done == [[5]]
    kept = torch.stack(watcher.seen[0][0].actions)
    assert np.allclose(space().unnormalise(kept).numpy()[:, :6], log[:, :6])
    with pytest.raises(ValueError, match="give one with each action"):
        ours.observe(log[0])


def test_robots_end_at_different_times() -> None:
    ours, watcher = watched_policy()
    images, words = [picture(seed) for seed in range(3)], [WORDS] * 3
    ours.predict_action(images, words)
    ours.predict_action(images[::2], words[::2], robots=[0, 2])
    ours.reset(robots=[0])  # after two steps; the others go on
    ours.predict_action(images, words)
    assert watcher.done == [[0, 0, 0], [1, 1], [0, 1, 2]]
    assert [len(ours.steps(robot)) for robot in range(4)] == [1, 2, 3, 0]
    ours.reset(success=[True, False, True])
    assert [one.outcomes for one in watcher.seen[-1]] == [[True], [False], [True]]


def test_threads_with_robots_of_their_own_do_not_disturb_each_other() -> None:
    ours = fast()
    found: dict[int, list[np.ndarray]] = {0: [], 1: []}

    def drive(robot: int) -> None:
        for step in range(4):
            image = picture(10 * robot + step)
            found[robot].append(ours.predict_action([image], [WORDS], robots=[robot])[0])

    threads = [threading.Thread(target=drive, args=(robot,)) for robot in found]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for robot, actions in found.items():
        assert len(ours.steps(robot)) == 4
        for step, action in enumerate(actions):
            assert np.array_equal(action, own(picture(10 * robot + step), WORDS))


def test_nobody_interferes_with_an_action_that_is_being_predicted() -> None:
    ours = fast("plain")
    stream = ours.stream(picture(), WORDS)
    so_far = [next(stream).partial()[0] for _ in range(2)]
    assert [len(one) for one in so_far] == [1, 2]
    for act in (
        lambda: ours.predict_action(picture(), WORDS),
        lambda: ours.observe(np.zeros(SIZE)),
        ours.reset,
    ):
        with pytest.raises(ValueError, match="robot 0 is already being predicted"):
            act()
    assert ours.predict_action([picture()], [WORDS], robots=[1]).shape == (1, SIZE)
    stream.close()
    assert np.array_equal(ours.predict_action(picture(), WORDS)[:2], so_far[1])


def test_generate_and_the_hook_are_those_of_the_model() -> None:
    made = dict(processor().instruct([WORDS, LONGER], [[Image.fromarray(picture())]] * 2))
    wanted = policy().generate(**made, max_new_tokens=9, do_sample=False)
    ours, (watching, watcher) = fast(), watched_policy()
    assert torch.equal(ours.generate(**made, max_new_tokens=9).sequences, wanted)
    how: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(policy().generate(**made, **how, custom_generate=ours), wanted)
    watching.generate(**made, max_new_tokens=2)
    assert watcher.done == [[0, 0]]  # robots that did nothing yet


def test_a_deadline_ends_with_the_action_before() -> None:
    ours = fast("plain", deadline_ms=1e-6)
    first = ours.predict_action(picture(), WORDS)
    assert np.array_equal(first, own(picture(), WORDS))  # nothing to hold: it runs to its end
    assert (stats_of(ours).held_dims, stats_of(ours).deadlines_missed) == (0, 1)
    assert stats_of(ours).exact
    second = ours.predict_action(picture(1), WORDS)
    assert np.array_equal(second[:1], own(picture(1), WORDS)[:1])
    assert np.allclose(second[1:], first[1:], rtol=0, atol=1e-12)
    stats = stats_of(ours)
    assert (stats.held_dims, stats.deadlines_missed, stats.exact) == (SIZE - 1, 1, False)
    assert ours.steps()[-1].tokens == ours.steps()[-1].tokens[:1]
    assert ours.steps()[-1].sources == ("target", *["held"] * (SIZE - 1))
    relaxed = ours.predict_action(picture(1), WORDS, deadline_ms=1e6)
    assert np.array_equal(relaxed, own(picture(1), WORDS))
    assert (stats_of(ours).held_dims, stats_of(ours).deadlines_missed) == (0, 0)
    ours.predict_action([picture(1)] * 2, [WORDS] * 2)  # robot 1 has nothing to hold
    assert (stats_of(ours).held_dims, stats_of(ours).deadlines_missed) == (0, 2)


def test_statistics_of_a_step() -> None:
    ours = fast("plain")
    for _ in range(3):
        ours.predict_action(picture(), WORDS, evaluate=True)
    stats, steps = stats_of(ours), ours.steps()
    assert [one.index for one in steps] == [0, 1, 2]
    assert (stats.rounds_per_action, stats.calls_per_action) == (SIZE, SIZE - 1)
    assert stats.token_distance == (0.0,) * SIZE
    assert stats.action_error_max == (0.0,) * SIZE
    latencies = [one.latency_ms for one in steps]
    assert stats.latency_p50_ms == sorted(latencies)[1]
    assert stats.latency_p99_ms == max(latencies)
    shakes = sorted(abs(b - a) for a, b in pairwise(latencies))
    assert (stats.jitter_p50_ms, stats.jitter_p99_ms) == tuple(shakes)
    assert stats.control_hz == pytest.approx(1e3 / latencies[-1])
    assert json.loads(json.dumps(stats.to_dict()))["steps"] == 1
