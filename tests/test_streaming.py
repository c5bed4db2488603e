"""Runs turned inside out: rounds in order, one side at a time, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import mmspec
from mmspec.streaming import stream_rounds
from tests import toys
from tests.toys.pipelines import build_request, pipeline


def counted(most: int, seen: list[int]) -> Callable[[Callable[[int], None]], str]:
    def run(watch: Callable[[int], None]) -> str:
        for number in range(most):
            watch(number)
            seen.append(number)
        return "done"

    return run


def test_items_come_one_at_a_time_and_the_run_waits() -> None:
    seen: list[int] = []
    items = stream_rounds(counted(3, seen))
    assert next(items) == 0
    assert seen == []  # the run stands in its watcher until the next is asked for
    assert next(items) == 1
    assert seen == [0]
    assert list(items) == [2]
    assert seen == [0, 1, 2]


def test_the_run_s_own_value_is_returned() -> None:
    items = stream_rounds(counted(2, []))
    assert (next(items), next(items)) == (0, 1)
    with pytest.raises(StopIteration) as end:
        next(items)
    assert end.value.value == "done"


def test_an_abandoned_stream_ends_its_run_and_its_thread() -> None:
    before, seen = threading.active_count(), list[int]()
    items = stream_rounds(counted(1000, seen))
    assert next(items) == 0
    items.close()
    assert seen == []
    assert threading.active_count() == before


def test_nothing_runs_before_the_first_item_is_asked_for() -> None:
    before = threading.active_count()
    items = stream_rounds(counted(3, []))
    assert threading.active_count() == before
    items.close()


def test_errors_are_raised_where_the_stream_is_read() -> None:
    def run(watch: Callable[[int], None]) -> None:
        watch(1)
        raise ValueError("in the middle")

    items = stream_rounds(run)
    assert next(items) == 1
    with pytest.raises(ValueError, match="in the middle"):
        next(items)


def test_the_caller_s_precision_holds_in_the_run() -> None:
    def run(watch: Callable[[Any], None]) -> None:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        watch((product.dtype, torch.is_grad_enabled()))

    with torch.autocast("cpu", torch.bfloat16):
        ((dtype, _),) = stream_rounds(run)
    assert dtype == torch.bfloat16


def test_the_caller_s_context_holds_in_the_run() -> None:
    mine = ContextVar("mine", default="nobody's")
    mine.set("the caller's")
    seen: list[Any] = []

    def run(watch: Callable[[int], None]) -> None:
        seen.extend((mine.get(), torch.is_inference_mode_enabled()))
        watch(0)

    with torch.inference_mode():
        assert list(stream_rounds(run)) == [0]
    assert seen == ["the caller's", True]


def test_a_language_model_streams_what_it_generates() -> None:
    model, request = toys.model("llava"), toys.inputs("llava")
    fast = mmspec.accelerate(model, "prompt-lookup")
    whole = fast.generate(**request, max_new_tokens=9)
    rounds = list(fast.stream(**request, max_new_tokens=9))
    start = request["input_ids"].shape[1]
    spoken = [token for kept in rounds for token in kept.tokens[0]]
    assert spoken == whole.sequences[0, start:].tolist()
    assert [kept.index for kept in rounds] == list(range(len(rounds)))


def test_an_abandoned_stream_leaves_the_last_statistics() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "plain")
    fast.generate(**request, max_new_tokens=5)
    kept = fast.last_stats
    stream = fast.stream(**request, max_new_tokens=9)
    next(stream)
    stream.close()
    assert fast.last_stats is kept


def test_a_pipeline_streams_the_rounds_that_it_shows_its_watcher() -> None:
    fast = mmspec.accelerate(pipeline("ddpm"), "asd", window=3)
    given = {**build_request("ddpm", 2), "num_inference_steps": 6, "output_type": "np", "seed": 1}
    watched: list[int] = []
    output = fast(**given, on_round=lambda kept: watched.append(kept.index))
    stream = fast.stream(**given)
    rounds = []
    while True:
        try:
            rounds.append(next(stream).index)
        except StopIteration as end:
            streamed_output = end.value
            break
    assert rounds == watched
    assert (streamed_output.images == output.images).all()
    assert streamed_output.stats.target_calls == output.stats.target_calls
