"""Training of the policy of the zoo: frames, targets, and growth of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.modalities.vla.worlds.arm import apply_action, tilt
from mmspec.modalities.vla.worlds.expert import table_expert
from mmspec.models.prismatic_processor import PrismaticProcessor
from mmspec.training.fitting import TrainingRun
from tools.zoo.vla.architecture import (
    HALF,
    LAYERS,
    build,
    build_tokenizer,
    deepen,
)
from tools.zoo.vla.frames import TableFrames, action_statistics, make_frames
from tools.zoo.vla.policy_training import (
    ActionExamples,
    action_loss,
    encode_images,
    foresight_loss,
    read_states,
)
from tools.zoo.vla.train import space_of


@pytest.fixture(scope="module")
def training_frames() -> TableFrames:
    return make_frames(6, 2, TrainingRun())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    return build(tokenizer, action_statistics(0, 30), layers=2).train(False)


def test_questions_behind_one_picture_do_not_see_each_other(
    training_frames: TableFrames, model: Any, tokenizer: Any
) -> None:
    """Packed, each has the states that the processor's own prompt for it has."""
    teacher = ActionExamples(training_frames, model, tokenizer, space_of(model))
    row = max(range(len(training_frames)), key=lambda i: len(training_frames.instructions[i]))
    assert len(training_frames.instructions[row]) > 1
    item = teacher.batch(np.array([row]), np.random.default_rng(0))
    ears = PrismaticProcessor.of(model, tokenizer, means=[HALF] * 2, stds=[HALF] * 2)
    with torch.no_grad():
        packed, _ = read_states(model, item)
        for number, asked in enumerate(training_frames.instructions[row]):
            inputs = ears.instruct(asked, training_frames.images[row])
            answer = item.ids.flatten()[item.answers[number][1:]]
            ids = torch.cat((inputs["input_ids"], answer[None]), 1)
            alone = model(
                input_ids=ids, pixel_values=inputs["pixel_values"], output_hidden_states=True
            ).hidden_states[-1]
            assert_close(packed[number], alone[0, -7:], atol=2e-4, rtol=1e-3)


def test_frozen_towers_show_what_they_see(
    training_frames: TableFrames, model: Any, tokenizer: Any
) -> None:
    seen = encode_images(model, training_frames)
    space = space_of(model)
    picked = np.arange(4)
    batches = [
        ActionExamples(training_frames, model, tokenizer, space, known).batch(
            picked, np.random.default_rng(1)
        )
        for known in (None, seen)
    ]
    with torch.no_grad():
        shown, known = (read_states(model, item)[0] for item in batches)
    assert_close(known, shown, atol=2e-2, rtol=1e-2)  # features are kept in float16


def test_a_grown_policy_says_what_the_shallow_one_says(
    training_frames: TableFrames, model: Any, tokenizer: Any
) -> None:
    item = ActionExamples(training_frames, model, tokenizer, space_of(model)).batch(
        np.arange(3), np.random.default_rng(0)
    )
    deep = deepen(model, tokenizer).train(False)
    assert len(deep.language_model.model.layers) == LAYERS >= 24
    with torch.no_grad():
        assert_close(read_states(deep, item)[0], read_states(model, item)[0], atol=1e-5, rtol=1e-4)
        for layer in deep.language_model.model.layers:
            layer.self_attn.o_proj.weight.add_(0.1)
        assert not torch.allclose(
            read_states(deep, item)[0], read_states(model, item)[0], atol=1e-2
        )


def test_the_distribution_that_is_taught_peaks_at_the_experts_tokens() -> None:
    """The loss is least, up to its spread, where every token's distribution is the taught one."""
    space = ActionSpace.from_statistics(action_statistics(0, 30), ActionCodes(300))
    actions = torch.tensor([[-1.0, -0.5, 0.0, 0.013, 0.5, 0.999, 1.0]], dtype=torch.float64)

    def loss_at(values: torch.Tensor) -> torch.Tensor:
        ids = space.encode(values)
        logits = -((torch.arange(300) - ids[..., None]).square() / 32.0)
        return action_loss(logits, actions, space)

    right = loss_at(actions)
    for off in (0.05, -0.05):
        wrong = loss_at(actions + off)
        assert (wrong[1:5] > right[1:5] + 1).all()
    assert right.max() < 3


def test_foresight_is_least_where_guess_expert_and_policy_agree() -> None:
    """It asks at each token for what is not said yet, and moves the guess and the policy."""
    codes = ActionCodes(300)
    actions = codes.centers[torch.tensor([[3, 40, 90, 127, 128, 200, 250]])].float()
    logits = torch.zeros(1, 7, 300)
    logits[0, torch.arange(7), codes.encode(actions)[0]] = 50.0
    guesses = actions[:, None].expand(1, 7, 7).clone()
    assert foresight_loss(guesses, logits, actions, codes) < 1e-6
    before = torch.ones(7, 7).tril(-1).bool()
    guesses[:, before] += 0.5  # what was said already is not asked for
    assert foresight_loss(guesses, logits, actions, codes) < 1e-6
    for row, column in ((0, 6), (3, 3)):
        wrong = guesses.clone().requires_grad_()
        said = (logits / 25).requires_grad_()
        with torch.no_grad():
            wrong[0, row, column] += 0.2
        loss = foresight_loss(wrong, said, actions, codes)
        loss.backward()
        assert loss > 0.01
        assert wrong.grad is not None
        assert said.grad is not None
        assert wrong.grad[0, row, column] > 0
        assert said.grad[0, column].abs().max() > 0


def test_the_wrist_leans_as_no_picture_could_tell_otherwise(training_frames: TableFrames) -> None:
    for pose in training_frames.poses:
        np.testing.assert_allclose(pose[3:5], tilt(*map(float, pose[:3])))


def test_frames_hold_the_experts_actions_for_every_thing(training_frames: TableFrames) -> None:
    assert len(training_frames) == 12
    for pose, scene, asked, goals, actions in zip(
        training_frames.poses,
        training_frames.scenes,
        training_frames.instructions,
        training_frames.goals,
        training_frames.actions,
        strict=True,
    ):
        assert scene.split == "train"
        assert len(asked) == len(scene.things) == len(goals)
        for goal, action in zip(goals, actions, strict=True):
            np.testing.assert_allclose(action, table_expert(pose, tuple(goal)))


def test_statistics_bound_what_the_expert_does() -> None:
    found = action_statistics(0, 60)
    low, high = np.array(found["q01"]), np.array(found["q99"])
    assert found["mask"] == [True] * 6 + [False]
    assert (low[:6] < 0).all()
    assert (high > 0).all()
    pose, generator, inside = np.array([0.2, -0.1, 0.2, 0, 0, 1, 0]), np.random.default_rng(0), []
    for _ in range(20):
        action = table_expert(pose, (-0.1, 0.1))
        inside.append((low[:6] - 1e-3 <= action[:6]) & (action[:6] <= high[:6] + 1e-3))
        pose = apply_action(pose, action, generator)
    assert np.mean(inside) > 0.9
