"""One declaration makes a head trainable: the same steps train all recipes that have it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmspec
from mmspec import recipes
from mmspec.models.compatibility import KEY
from mmspec.training.fitting import CosineDecay, ScheduledOptimizer
from mmspec.training.head_trainer import HeadTrainer, ShuffledBatches, TrainingSettings
from mmspec.training.heads import TrainingExample
from tests import toys
from tests.covering import covering
from tests.drafters.heads import greedy_example
from tests.toys.readers import backbone

POLICIES = ("oft-draft",)  # of a policy, whose actions have a length of their own
LATER = ("gto",)  # stages after another training, without new heads
TRAINABLE = [
    name
    for name in recipes.names("tokens")
    if name not in (*POLICIES, *LATER) and recipes.get(name).training is not None
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


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    covering(["eagle-2", "eagle-3"], [torch.bfloat16, torch.float16], strength=1),
)
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


# --- stages, noise and batches of a trainer -------------------------------------------------------

FIRST, SECOND = 3, 4  # steps of the stages


class TwoWeights(nn.Module):
    """One weight per stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(2)) for _ in range(2))
        self.config = SimpleNamespace()


class TwoStages:
    """Trains the first weight, then the second one, by a loss with noise."""

    rate, reads_states, is_packable = 0.1, False, False

    def __init__(self) -> None:
        self.noise: list[float] = []

    def begin(self, target: Any, counts: Tensor, **changes: Any) -> nn.Module:
        return TwoWeights()

    def check(self, head: Any, reader: Any) -> None: ...

    def load(self, *_: Any, **__: Any) -> nn.Module:
        raise NotImplementedError

    def loss(self, reader: Any, head: Any, example: Any) -> Tensor:
        self.noise.append(float(torch.rand(())))
        total: Tensor = ((head.first + 2 * head.second - self.noise[-1]) ** 2).sum()
        return total

    def stages(
        self, head: Any, steps: int, rate: float, muon: bool = False
    ) -> list[ScheduledOptimizer]:
        return [
            ScheduledOptimizer([head.first], CosineDecay(FIRST, rate)),
            ScheduledOptimizer([head.second], CosineDecay(steps - FIRST, rate)),
        ]

    def parts(self, head: Any) -> Mapping[str, Any]:
        return {"drafter": head}


def trainer(**settings: Any) -> HeadTrainer:
    how = TrainingSettings(**{"steps": FIRST + SECOND, "rate": 0.1, **settings})
    return HeadTrainer(TwoStages(), backbone(toys.model("llama")), TwoWeights(), how)


def take(made: HeadTrainer, steps: int, examples: int = 2) -> list[dict[str, Tensor]]:
    """The weights after each step."""
    example: Callable[[], Any] = lambda: None  # noqa: E731
    found = []
    for _ in range(steps):
        made.step([example] * examples)
        found.append({name: one.detach().clone() for name, one in made.head.named_parameters()})
    return found


def test_each_step_trains_the_weight_of_its_stage() -> None:
    made = trainer()
    before = {"first": torch.ones(2), "second": torch.ones(2)}
    for step, after in enumerate(take(made, 10)):
        moved = {name for name, one in after.items() if not torch.equal(one, before[name])}
        assert moved == {"first" if step < FIRST else "second"}  # the last stage goes on
        before = after
    assert [stage.num_steps_done for stage in made.stages] == [FIRST, 7]
    assert made.num_steps_done == 10


@pytest.mark.parametrize("taken", [0, 2, 3, 5, 9])
def test_a_restored_trainer_continues_in_its_stage(taken: int) -> None:
    whole, cut, other = (trainer(ema=0.5) for _ in range(3))
    expected = take(whole, taken + 3)[taken:]
    take(cut, taken)
    other.restore({name: one.clone() for name, one in cut.state().items()}, taken)
    assert [one.num_steps_done for one in other.stages] == [min(taken, 3), max(taken - 3, 0)]
    found = take(other, 3)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(other.average[name], one) for name, one in whole.average.items())


def test_noise_is_that_of_seed_step_and_example() -> None:
    """The caller's generator is left alone."""
    made, other = trainer(seed=1), trainer(seed=2)
    state = torch.get_rng_state()
    take(made, 3, examples=3)
    assert torch.equal(torch.get_rng_state(), state)
    take(other, 3, examples=3)
    assert len({*made.training.noise, *other.training.noise}) == 18  # type: ignore[attr-defined]


def test_averaged_weights_follow_by_one_minus_the_decay() -> None:
    made = trainer(ema=0.75)
    expected = torch.ones(2)
    for after in take(made, 3):
        expected = 0.75 * expected + 0.25 * after["first"]
    assert torch.allclose(made.average["first"], expected)
    head = made.trained_head()
    assert torch.equal(head.first, made.average["first"])
    assert not head.training
    assert made.head.training
    plain = trainer()
    (after,) = take(plain, 1)
    assert plain.average == {}
    assert torch.equal(plain.trained_head().first, after["first"])


@pytest.mark.parametrize("count", [32, 50])
def test_items_of_a_batch_have_similar_sizes(count: int) -> None:
    """Eight batches are sorted together: neighbours where there are no more."""
    sizes = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    batches = ShuffledBatches(sizes, [False] * count, batch=4).batches
    assert len(batches) == math.ceil(count / 4)
    spread = [max(own) - min(own) for own in ([sizes[item] for item in one] for one in batches)]
    if count == 32:
        assert spread == [3] * 8
    assert sum(spread) / len(spread) < count / 6  # of four at random: 3 / 5
    assert ShuffledBatches(sizes, [False] * count, batch=4, seed=1).batches != batches


def test_a_batch_number_counts_over_epochs() -> None:
    """Also going back, whichever was asked for before."""
    made = ShuffledBatches(list(range(20)), [False] * 20, batch=4)
    first = [made.at(number) for number in range(10)]
    for epoch in (first[:5], first[5:]):
        assert sorted(item for batch in epoch for item in batch) == list(range(20))
    assert [made.at(number) for number in (7, 2, 9, 0)] == [first[at] for at in (7, 2, 9, 0)]
