"""Prompts of several requests are read together where that changes nothing, and when it pays."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import mmspec
from mmspec.serving import prompts
from mmspec.serving.prompts import PromptTimer
from mmspec.serving.ticket import DeadlineExceeded
from mmspec.targets.tokens.chunks import ChunkedPrompt
from mmspec.targets.tokens.merge import merge_requests
from tests import toys
from tests.covering import limited
from tests.serving.test_engine import Request, accelerated, mixed_requests, wait_until
from tests.targets.tokens.test_chunks import lengthen


def run_all(
    fast: Any, requests: list[dict[str, Any]], max_rows: int = 8
) -> tuple[mmspec.Engine, int]:
    """Run all requests at once; returns the engine, and how many have the tokens of each alone."""
    expected = [fast.generate(**one).sequences for one in requests]
    with mmspec.Engine(fast, max_rows=max_rows, max_queue=len(requests)) as engine:
        found = [future.result(60) for future in [engine.submit(one) for one in requests]]
    pairs = zip(found, expected, strict=True)
    return engine, sum(torch.equal(one.sequences, own) for one, own in pairs)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llava", "coupled"),
        ("qwen2_5_vl", "eagle-3"),
        pytest.param("gemma3", "coupled", marks=pytest.mark.exhaustive),
        pytest.param("idefics3", "coupled", marks=pytest.mark.exhaustive),
        pytest.param("mistral-sliding", "speculative-sampling", marks=pytest.mark.exhaustive),
    ],
)
def test_prompts_are_read_together_and_give_the_tokens_of_each_alone(
    family: str, recipe: str
) -> None:
    engine, same = run_all(accelerated(family, recipe), mixed_requests(family, 12))
    assert same == 12
    assert engine.counters.prompt_forwards < 12
    assert not engine._prompts.groups.reasons


def test_processors_do_not_see_the_padding_of_other_prompts() -> None:
    fast, requests = accelerated("llama", "coupled"), mixed_requests("llama", 8)
    for request in requests:
        request |= {"repetition_penalty": 1.5, "max_new_tokens": 6}
    engine, same = run_all(fast, requests)
    assert same == 8
    assert engine.counters.prompt_forwards < 8


def test_a_model_that_reads_row_by_row_says_why() -> None:
    engine, same = run_all(accelerated("lfm2", "coupled"), mixed_requests("lfm2", 4))
    assert same == 4
    assert [*engine._prompts.groups.reasons] == ["Lfm2ForCausalLM is read row by row"]


def test_requests_that_cannot_be_padded_are_read_alone() -> None:
    fast, requests = accelerated("llama", "plain"), mixed_requests("llama", 6)
    mask = torch.ones_like(requests[0]["input_ids"])
    mask[0, 1] = 0
    requests[0] |= {"attention_mask": mask}
    engine, same = run_all(fast, requests)
    assert same == 6
    assert dict(engine._prompts.groups.reasons) == {"its attention_mask hides tokens": 1}


@pytest.mark.parametrize("fault", ["mask", "media"])
def test_a_wrong_merge_is_noticed_and_gives_no_wrong_token(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding that is read, and pictures in another order."""
    merge = merge_requests

    def merge_wrongly(requests: Any, filler: int) -> Any:
        merged: Any = merge(requests, filler)
        if fault == "mask":
            merged.inputs["attention_mask"][:] = 1
        else:
            merged.inputs["pixel_values"] = merged.inputs["pixel_values"].flip(0)
        return merged

    monkeypatch.setattr(prompts, "merge_requests", merge_wrongly)
    engine, same = run_all(accelerated("llava", "coupled"), mixed_requests("llava", 8))
    assert same == 8
    assert engine._prompts.groups.reasons["read together they have other scores"]


def test_a_prompt_that_fails_among_others_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = accelerated("llava", "coupled")
    request: Request = {**toys.inputs("llava"), "do_sample": False, "max_new_tokens": 4}
    broken = {**request, "pixel_values": request["pixel_values"].repeat(2, 1, 1, 1)}
    expected = fast.generate(**request).sequences
    with mmspec.Engine(fast) as engine:
        futures = [engine.submit(one) for one in (request, broken, request, broken, request)]
        for future in futures[::2]:
            assert torch.equal(future.result(20).sequences, expected)
        for future in futures[1::2]:
            with pytest.raises(Exception, match=r"(?i)image"):
                future.result(20)


def test_prompts_wait_until_their_waiting_costs_what_a_forward_would() -> None:
    now = [0.0]
    timer = PromptTimer(lambda: now[0])
    assert timer.is_due(1, 4)  # nothing is measured yet
    timer.add(1, 0.05)
    timer.add(2, 0.06)
    assert timer.saved_s == pytest.approx(0.04)
    assert not timer.is_due(0, 4)
    assert timer.is_due(1, 0)  # no row runs that would lose time
    assert not timer.is_due(1, 4)
    now[0] += 0.1
    assert not timer.is_due(1, 4)  # 0.1 of 0.16 s
    now[0] += 0.04
    assert timer.is_due(2, 4)


def test_long_prompts_are_read_in_chunks_beside_running_rows() -> None:
    """A row that runs has a round after every chunk, and all tokens are those alone."""
    fast, tokens = accelerated("qwen2_5_vl", "coupled"), list[int]()
    slow: Request = {**toys.inputs("qwen2_5_vl"), "do_sample": False, "max_new_tokens": 60}
    long: Request = {**lengthen(toys.inputs("qwen2_5_vl", 3), 60), "seed": 1, "max_new_tokens": 5}
    expected = [fast.generate(**one).sequences for one in (slow, long, long)]
    with mmspec.Engine(fast, max_prompt_slots=10) as engine:
        first = engine.submit(slow, on_round=lambda round_: tokens.append(round_.index))
        wait_until(lambda: tokens)
        seen: list[int] = []
        second = engine.submit(long, on_round=lambda _: seen.append(len(tokens)))
        third = engine.submit(long)
        found = [future.result(20) for future in (first, second, third)]
    assert all(map(torch.equal, (one.sequences for one in found), expected))
    chunks = (long["input_ids"].shape[1] - slow["input_ids"].shape[1]) // 10
    assert seen[0] > chunks
    assert not engine._prompts.groups.reasons


def test_a_long_prompt_ends_in_mid_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is cancelled or late, or memory is short; others go on."""
    fast = accelerated("llama", "plain")
    step, calls = ChunkedPrompt.step, list[int]()

    def slow_step(self: Any) -> Any:
        calls.append(1)
        time.sleep(0.06)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return step(self)

    monkeypatch.setattr(ChunkedPrompt, "step", slow_step)
    small = {**toys.inputs("llama"), "do_sample": False, "max_new_tokens": 4}
    long = {**lengthen(toys.inputs("llama"), 300), "do_sample": False, "max_new_tokens": 4}
    expected = [fast.generate(**one).sequences for one in (small, long)]
    with mmspec.Engine(fast, max_prompt_slots=16) as engine:
        late = engine.submit(long, timeout_s=0.6)
        cancelled = engine.submit(long)
        other = engine.submit(small)
        with pytest.raises(DeadlineExceeded):
            late.result(20)
        wait_until(lambda: engine._prompts.partial is not None)
        cancelled.cancel()
        assert torch.equal(other.result(20).sequences, expected[0])
        monkeypatch.setattr(ChunkedPrompt, "step", step)
        assert torch.equal(engine.submit(long).result(20).sequences, expected[1])
    assert (engine.counters.expired, engine.counters.cancelled) == (1, 1)
    assert engine.counters.restarted == 1


@pytest.mark.parametrize(
    "parts",
    limited([{"kv": "sparse:tokens=3"}, {"kv": "pooled:tokens=2"}, {"kv": "same"}], 2),
    ids=str,
)
def test_drafts_on_a_part_of_the_cache_join_and_leave(parts: dict[str, Any]) -> None:
    """Views of the target's memory: the tokens and the drafts of each request alone."""
    fast: Any = mmspec.accelerate(toys.model("llava"), "draft-verify", **parts, length=3)
    requests = [
        {**toys.inputs("llava", seed=seed), "max_new_tokens": 6 + 4 * seed, "do_sample": False}
        for seed in range(4)
    ]
    alone = [fast.generate(**one) for one in requests]
    with mmspec.Engine(fast, max_rows=3) as engine:
        futures = [engine.submit(one) for one in requests]
        found = [one.result(timeout=60) for one in futures]
    assert engine.counters.rounds < engine.counters.row_rounds  # rows ran together
    for mine, theirs in zip(found, alone, strict=True):
        assert torch.equal(mine.sequences, theirs.sequences)
        assert mine.stats.fallback is None
        assert mine.stats.per_step_accepted == theirs.stats.per_step_accepted
