"""Threads that ask one model at once: each gets its own answer, and rounds do not overlap."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
import torch

import mmspec
from tests import toys
from tests.partners import noisy

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


class Busy:
    """How many threads are inside a module at a time, at most."""

    def __init__(self, module: Any) -> None:
        self.now = self.most = 0
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        sleep(0.005)

    def _leave(self, *_: Any) -> None:
        self.now -= 1


@pytest.mark.parametrize("recipe", ["coupled", "std"])
def test_threads_take_turns(recipe: str) -> None:
    """Two accelerated models of one target, each asked by two threads."""
    model = toys.model("llava")
    requests = [toys.inputs("llava", seed) for seed in range(4)]
    expected = [model.generate(**request, **GREEDY) for request in requests]
    drafted = {"drafter": noisy("llava")} if recipe == "coupled" else {}
    fast = [mmspec.accelerate(model, recipe, **drafted) for _ in range(2)]
    busy = Busy(model.get_decoder())
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(fast[i % 2].generate, **one, **GREEDY) for i, one in enumerate(requests)
        ]
        found = [one.result().sequences for one in asked]
    assert all(map(torch.equal, found, expected))
    assert busy.most == 1


def test_streams_of_one_model_may_be_read_in_turns() -> None:
    model = toys.model("llama")
    requests = [toys.inputs("llama", seed) for seed in range(2)]
    fast = mmspec.accelerate(model, "coupled", drafter=noisy("llama"))
    streams, found = [fast.stream(**one, **GREEDY) for one in requests], dict[int, Any]()
    while len(found) < len(streams):
        for i, stream in enumerate(streams):
            if i not in found:
                try:
                    next(stream)
                except StopIteration as end:
                    found[i] = end.value.sequences
    for i, one in enumerate(requests):
        assert torch.equal(found[i], model.generate(**one, **GREEDY))


def test_a_model_that_drafts_for_another_takes_turns_too() -> None:
    """What a round notes of a target must not be of its forwards as a draft model."""
    small, large = toys.model("llava"), toys.model("llava", seed=3, layers=3)
    asked = [mmspec.accelerate(small, "std"), mmspec.accelerate(large, "coupled", drafter=small)]
    requests = [toys.inputs("llava", seed) for seed in range(4)]
    expected = [(small, large)[i % 2].generate(**one, **GREEDY) for i, one in enumerate(requests)]
    busy = Busy(small.get_decoder())
    with ThreadPoolExecutor(4) as threads:
        futures = [
            threads.submit(asked[i % 2].generate, **one, **GREEDY) for i, one in enumerate(requests)
        ]
        found = [one.result() for one in futures]
    assert all(torch.equal(one.sequences, own) for one, own in zip(found, expected, strict=True))
    assert not any(one.stats.fallback for one in found)
    assert busy.most == 1
