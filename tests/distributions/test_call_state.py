"""Processors and criteria of a user's own: those that keep state between calls are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.distributions.call_state import MAX_VALUES, StateWatch, describe_state
from tests import toys

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


class Counter:
    """Forbids a token at every third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, torch.tensor([7]), -1e9) if self.calls % 3 == 0 else scores


class Remembers:
    """Forbids the tokens that it was called with."""

    def __init__(self) -> None:
        self.seen = {"tokens": set[int]()}

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen["tokens"].update(ids[0].tolist())
        return scores.index_fill(1, torch.tensor(sorted(self.seen["tokens"])), -1e9)


class InPlace:
    """Adds what it counted in a tensor."""

    def __init__(self) -> None:
        self.bias = torch.zeros(1)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias.add_(0.5) * torch.arange(scores.shape[1]).remainder(3)

    def method(self, ids: Tensor, scores: Tensor) -> Tensor:
        return self(ids, scores)


class PreparesOnce:
    """Makes its table in the first call; the same tokens give the same scores."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(scores.shape[1]).remainder(5)
        return scores - self.table * (ids[:, -1:] % 2)


def closure() -> Any:
    calls = [0]

    def penalise(ids: Tensor, scores: Tensor) -> Tensor:
        calls[0] += 1
        return scores - calls[0] % 2 * torch.arange(scores.shape[1]).remainder(3)

    return penalise


def noisy() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda ids, scores: scores + torch.rand(scores.shape, generator=generator)


def hidden() -> Any:
    """State that cannot be looked at: the two answers to the first call differ."""
    steps = count()
    return lambda ids, scores: scores + next(steps) * torch.arange(scores.shape[1]).remainder(3)


STATEFUL: dict[str, Callable[[], Any]] = {
    "counter": Counter,
    "remembers": Remembers,
    "in place": InPlace,
    "method": lambda: InPlace().method,
    "partial": lambda: partial(InPlace().method),
    "closure": closure,
    "noisy": noisy,
    "hidden": hidden,
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_processor_that_keeps_state_is_refused(name: str) -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    for recipe in ("plain", "prompt-lookup"):
        fast = mmspec.accelerate(model, recipe)
        with pytest.raises(ValueError, match=r"keeps state between calls.*use model.generate\(\)"):
            fast.generate(**request, **GREEDY, logits_processor=[STATEFUL[name]()])
        own: Any = [STATEFUL[name]()]
        with pytest.raises(ValueError, match="keeps state between calls"):
            model.generate(**request, **GREEDY, logits_processor=own, custom_generate=fast)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_processor_that_prepares_itself_once_passes(batch: int) -> None:
    model, request = toys.model("llama"), toys.inputs("llama", batch=batch, ragged=True)
    own: Any = [PreparesOnce()]
    expected = model.generate(**request, **GREEDY, logits_processor=own)
    for recipe in ("plain", "prompt-lookup"):
        fast = mmspec.accelerate(model, recipe)
        out = fast.generate(**request, **GREEDY, logits_processor=[PreparesOnce()])
        assert torch.equal(out.sequences, expected)


def test_a_constraint_that_keeps_state_is_refused() -> None:
    model, request, seen = toys.model("llama"), toys.inputs("llama"), list[int]()

    def allow(row: int, ids: Tensor) -> list[int]:
        seen.append(len(ids))
        return list(range(10, 40))

    with pytest.raises(ValueError, match="keeps state between calls"):
        mmspec.accelerate(model, "plain").generate(
            **request, **GREEDY, prefix_allowed_tokens_fn=allow
        )


class StopsAfter:
    """A criterion that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(ids),), self.calls >= 5)


def test_a_criterion_that_counts_gets_the_calls_of_generate_for_one_row() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    several = toys.inputs("llama", batch=2)
    expected = model.generate(**request, **GREEDY, stopping_criteria=[StopsAfter()])
    for recipe in ("plain", "prompt-lookup"):
        fast = mmspec.accelerate(model, recipe)
        out = fast.generate(**request, **GREEDY, stopping_criteria=[StopsAfter()])
        assert torch.equal(out.sequences, expected)
        with pytest.raises(ValueError, match=r"StopsAfter keeps state between calls \(calls chang"):
            fast.generate(**several, **GREEDY, stopping_criteria=[StopsAfter()])


def test_a_large_table_costs_little_and_its_growth_is_noticed() -> None:
    table = {number: [number] for number in range(100 * MAX_VALUES)}
    own = partial(lambda ids, scores, table: scores, table=table)
    watch = StateWatch(own)
    watch.check()
    watch.check()
    assert describe_state(own) == describe_state(own)
    table[-1] = [0]
    with pytest.raises(ValueError, match="keywords changed"):
        watch.check()
