"""One declaration makes a head trainable: the same steps train all recipes that have it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.models.compatibility import KEY
from mmspec.training.head_trainer import HeadTrainer, ShuffledBatches, TrainingSettings
from mmspec.training.heads import TrainingExample
from tests import toys
from tests.drafters.heads import greedy_example
from tests.toys.readers import backbone

POLICIES = ("oft-draft",)  # of a policy, whose actions have a length of their own
TRAINABLE = [
    name
    for name in recipes.names("tokens")
    if name not in POLICIES and recipes.get(name).training is not None
]


@lru_cache(maxsize=2)
def said(family: str) -> TrainingExample:
    example, _ = greedy_example(toys.model(family), toys.inputs(family, batch=2, ragged=True), 9)
    return example


def untrained(recipe: str, model: Any, seed: int = 0, **settings: Any) -> HeadTrainer:
    """A head of a toy, with nothing learnt; the steps are 6 if not said."""
    training, reader = recipes.get(recipe).training, backbone(model)
    assert training is not None
    torch.manual_seed(seed)
    head = training.begin(reader, torch.arange(reader.vocabulary))
    how = TrainingSettings(**{"steps": 6, "rate": 3e-3, **settings})
    return HeadTrainer(training, reader, head, how)


def taught(trainer: HeadTrainer, steps: int) -> list[float]:
    """The losses of further steps on one lesson."""
    return [trainer.step([lambda: said("llava")]) for _ in range(steps)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", TRAINABLE)
def test_every_recipe_with_a_declaration_learns(recipe: str) -> None:
    """The loss falls, the head knows its target, and drafts for it under its recipe."""
    model = toys.model("llava")
    trainer = untrained(recipe, model)
    losses = taught(trainer, 6)
    assert losses[-1] < losses[0]
    head = trainer.trained_head()
    assert KEY in vars(head.config)
    training = recipes.get(recipe).training
    assert training is not None
    fast = mmspec.accelerate(model, recipe, **training.parts(head))
    given = toys.inputs("llava", batch=2, ragged=True)
    out = fast.generate(**given, max_new_tokens=9, do_sample=False)
    assert torch.equal(out.sequences[:, given["input_ids"].shape[1] :], said("llava").tokens)


@pytest.mark.parametrize("recipe", ["eagle-2", "eagle-3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_targets_of_half_precision(recipe: str, dtype: torch.dtype) -> None:
    """Weights of the head stay float32, its arithmetic is the target's; so do averages."""
    trainer = untrained(recipe, toys.model("llava").to(dtype), ema=0.5)
    losses = taught(trainer, 4)
    assert losses[-1] < losses[0]
    assert {one.dtype for one in trainer.head.parameters()} == {torch.float32}
    own, average = dict(trainer.head.named_parameters()), trainer.average
    assert any(not torch.equal(own[name], one) for name, one in average.items())


def test_a_state_is_all_that_the_next_step_depends_on() -> None:
    """Two steps, a new trainer with that state, two more: bit for bit the weights of four."""
    model = toys.model("llava")
    whole, cut = (untrained("eagle-3", model, ema=0.9) for _ in range(2))
    taught(whole, 4)
    taught(cut, 2)
    other = untrained("eagle-3", model, seed=1, ema=0.9)
    other.restore({name: one.clone() for name, one in cut.state().items()}, cut.num_steps_done)
    taught(other, 2)
    ours, theirs = other.state(), whole.state()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_loss_that_is_no_number_stops() -> None:
    trainer = untrained("eagle", toys.model("llava"), rate=1e30)
    with pytest.raises(ValueError, match=r"the loss of step .* is (nan|inf); give a small"):
        taught(trainer, 12)


def test_a_shuffle_shows_everything_once_and_keeps_sorts_apart() -> None:
    sizes, sorts = list(range(23)), [place % 3 == 0 for place in range(23)]
    shuffle = ShuffledBatches(sizes, sorts, batch=4, seed=1)
    each = len(shuffle.batches)
    epochs = [[shuffle.at(number) for number in range(each * at, each * (at + 1))] for at in (0, 1)]
    for epoch in epochs:
        assert sorted(item for batch in epoch for item in batch) == sizes
        assert all(len({sorts[item] for item in batch}) == 1 for batch in epoch)
    assert epochs[0] != epochs[1]
    assert shuffle.at(3) == ShuffledBatches(sizes, sorts, batch=4, seed=1).at(3)  # also going back
