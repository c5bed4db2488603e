"""Weights of a head in training: float32, also where it computes in bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec import recipes
from mmspec.training.head_trainer import HeadTrainer, TrainingSettings
from mmspec.training.heads import TrainingExample
from tests import toys
from tests.drafters.heads import greedy_example
from tests.toys.readers import backbone

RATE, STEPS = 1e-5, 12  # a twentieth of what bfloat16 distinguishes at 1.0


@pytest.fixture(scope="module")
def example() -> TrainingExample:
    found, _ = greedy_example(toys.model("llava"), toys.inputs("llava", batch=2, ragged=True), 9)
    return found


def trainer(**settings: Any) -> HeadTrainer:
    """A trainer of one and the same head."""
    reader, training = backbone(toys.model("llava")), recipes.get("eagle-2").training
    assert training is not None
    torch.manual_seed(0)
    head = training.begin(reader, torch.ones(reader.vocabulary, dtype=torch.int64))
    with torch.no_grad():  # all of them are values of bfloat16
        for one in head.parameters():
            one.copy_(one.bfloat16())
    return HeadTrainer(training, reader, head, TrainingSettings(100, RATE, **settings))


def take_steps(made: HeadTrainer, example: TrainingExample, steps: int) -> list[float]:
    return [made.step([partial(TrainingExample, **vars(example))]) for _ in range(steps)]


def weights(made: HeadTrainer) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in made.head.named_parameters()}


def moved(made: HeadTrainer, before: dict[str, Tensor]) -> float:
    """How far the weights of about 1 went, on average."""
    after = weights(made)
    ones = [name for name, one in before.items() if bool((one == 1).all())]
    assert ones
    return float(torch.cat([(after[name] - before[name]).abs() for name in ones]).mean())


def test_small_updates_add_up_in_bfloat16(example: TrainingExample) -> None:
    """As far as in float32; weights of bfloat16, the control, do not move at all."""
    own, whole, rounded = trainer(bf16=True), trainer(), trainer(bf16=True)
    before = weights(own)
    take_steps(own, example, STEPS)
    take_steps(whole, example, STEPS)
    for _ in range(STEPS):
        take_steps(rounded, example, 1)
        with torch.no_grad():
            for one in rounded.head.parameters():
                one.copy_(one.bfloat16())
    assert moved(whole, before) > 0.3 * RATE * STEPS * 0.5
    assert moved(own, before) == pytest.approx(moved(whole, before), rel=0.2)
    assert moved(rounded, before) == 0
    assert {one.dtype for one in own.head.parameters()} == {torch.float32}


def test_a_checkpoint_keeps_float32_and_resumes_bit_for_bit(example: TrainingExample) -> None:
    made, again = trainer(bf16=True, ema=0.5), trainer(bf16=True, ema=0.5)
    take_steps(made, example, 3)
    state = {name: one.clone() for name, one in made.state().items()}
    assert {one.dtype for one in state.values() if one.is_floating_point()} == {torch.float32}
    head = {name: one for name, one in state.items() if name.startswith("head.")}
    assert any(not torch.equal(one, one.bfloat16().float()) for one in head.values())
    losses = take_steps(made, example, 3)
    again.restore(state, 3)
    assert take_steps(again, example, 3) == losses
    ours, theirs = made.state(), again.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
