"""Drafting while the target verifies: the same text, consistent timings, no repeated work."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from time import sleep
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.bench.frequency import measure_frequencies
from mmspec.bench.studies.overlap import ComponentCosts, overlapped_seconds, sequential_seconds
from mmspec.draft import Round
from mmspec.drafters.neural import pipelined
from mmspec.modalities.vlm import tiny_models as writers
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.covering import covering, exhaustive, limited
from tests.partners import noisy

ROOM = 17
SCHEDULES = ("pearl", "hippo", "parallelvlm", "pipeinfer")
WINDOWS = [(2, 0), (4, 0), (4, 2), (4, 4)]  # length, refill


@lru_cache(maxsize=4)
def pair(family: str) -> tuple[Any, Any]:
    return toys.model(family, layers=2), noisy(family, 0.02, layers=2)


def rounds(model: Any, drafter: Any, request: Any, **parts: Any) -> tuple[Any, list[Round]]:
    seen: list[Round] = []
    fast = mmspec.accelerate(model, "pearl", drafter=drafter, **parts)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False, on_round=seen.append)
    assert out.stats.fallback is None
    return out, seen


BATCHES: list[dict[str, Any]] = [{"batch": 3, "ragged": True}, {}]


@pytest.mark.parametrize(
    ("window", "batch"), limited(covering(WINDOWS, BATCHES, strength=1), 2), ids=str
)
def test_the_schedule_changes_nothing(window: tuple[int, int], batch: dict[str, Any]) -> None:
    length, refill = window
    model, drafter = pair("qwen2_5_vl")
    request = toys.inputs("qwen2_5_vl", **batch)
    waits = mmspec.accelerate(model, "coupled", drafter=drafter, length=length)
    fast = mmspec.accelerate(model, "pearl", drafter=drafter, length=length, refill=refill)
    for how in ({"do_sample": False}, {"temperature": 1.0, "seed": 3}):
        expected = waits.generate(**request, max_new_tokens=ROOM, **how)
        out = fast.generate(**request, max_new_tokens=ROOM, **how)
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.fallback is None
        assert 0 < out.stats.num_accepted_draft_tokens < out.stats.num_draft_tokens


@pytest.mark.parametrize("batch", exhaustive(BATCHES, BATCHES[:1]), ids=str)
def test_drafting_on_changes_nothing(batch: dict[str, Any]) -> None:
    model, drafter = pair("qwen2_5_vl")
    request = toys.inputs("qwen2_5_vl", **batch)
    waits = mmspec.accelerate(model, "coupled", drafter=drafter)
    fast = mmspec.accelerate(model, "pipeinfer", drafter=drafter, length=3)
    for how in ({"do_sample": False}, {"temperature": 1.0, "seed": 3}):
        expected = waits.generate(**request, max_new_tokens=ROOM, **how)
        out = fast.generate(**request, max_new_tokens=ROOM, **how)
        assert torch.equal(out.sequences, expected.sequences)
        assert out.stats.fallback is None


def drafted_by(name: str, slow: str, **parts: Any) -> tuple[int, list[Round]]:
    """Forwards of a perfect draft model, and rounds, where one of both models is slow."""
    model, copy = toys.model("llava", layers=2), toys.model("llava", layers=2)
    request, reads = toys.inputs("llava"), list[int]()
    delayed = {"target": model, "drafter": copy}[slow].model.language_model
    copy.model.language_model.register_forward_pre_hook(lambda *_: reads.append(1))
    wait = delayed.register_forward_pre_hook(lambda *_: sleep(0.03))
    try:
        seen: list[Round] = []
        fast = mmspec.accelerate(model, name, drafter=copy, **parts)
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False, on_round=seen.append)
    finally:
        wait.remove()
    assert out.stats.fallback is None
    return len(reads), [one for one in seen if one.calls]


def test_a_slow_target_finds_several_windows() -> None:
    reads, seen = drafted_by("pipeinfer", "target", length=2, ahead=6)
    assert [max(one.drafted) for one in seen[1:-1]] == [2] * (len(seen) - 2)  # `pearl` has 1
    assert reads <= 2 + ROOM  # and no token is drafted twice


def test_drafting_stops_when_the_target_has_verified() -> None:
    reads, seen = drafted_by("pipeinfer", "drafter", length=8, ahead=2)
    assert reads < 1 + 3 * len(seen)  # a window would be 8 a round
    waits, asked = drafted_by("pearl", "drafter", length=8)
    assert waits > 5 * len(asked)


@pytest.mark.parametrize("name", exhaustive(SCHEDULES, [*SCHEDULES][::2]))
def test_clips_are_drafted_ahead_of(name: str) -> None:
    model, drafter = pair("qwen2_5_vl")
    request = toys.with_video("qwen2_5_vl", batch=2)
    fast = mmspec.accelerate(model, name, drafter=drafter)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert (out.stats.fallback, out.stats.drafter_saw) == (None, "pixels")


@pytest.mark.parametrize(("length", "refill"), [(4, 0), (4, 4), (3, 0), (2, 0)])
def test_a_copy_is_ready_every_time(length: int, refill: int) -> None:
    """All accepted: `length` tokens a round, the first window overlapped or waited for."""
    model, request = toys.model("llava", layers=2), toys.inputs("llava", batch=2)
    _, seen = rounds(model, toys.model("llava", layers=2), request, length=length, refill=refill)
    asked = [kept for kept in seen if kept.calls]
    first = 1 + refill  # a token is read off the prefill before
    assert [len(kept.tokens[0]) for kept in asked[:2]] == [first, length]
    whole = [kept for kept in asked[1:] if max(kept.drafted) == length - 1]
    assert len(whole) >= (ROOM - 1 - first) // length - 1
    costs = ComponentCosts(draft=1.0, step=3.0, more=0.25)
    each = max(costs.verify(length - 1), length * costs.draft)
    assert overlapped_seconds(whole[:-1], costs, length, refill) == pytest.approx(
        each * (len(whole) - 1)
    )


def test_nothing_is_drafted_twice() -> None:
    """As many draft forwards as tokens of windows; none during the last round."""
    model, copy = toys.model("llava", layers=2), toys.model("llava", layers=2)
    reads: list[int] = []
    copy.model.language_model.register_forward_pre_hook(lambda *_: reads.append(1))
    out, seen = rounds(model, copy, toys.inputs("llava"), length=4)
    asked = [kept for kept in seen if kept.calls]
    assert len(reads) == 1 + 4 * (len(asked) - 1)  # the prefill, and four per window
    assert out.stats.target_calls == len(asked) < ROOM / 3


def test_a_thread_does_what_the_loop_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = pair("llava")
    request = toys.inputs("llava", batch=3, ragged=True)
    _, beside = rounds(model, drafter, request, length=4)

    def here(context: Context, work: Any) -> pipelined.BackgroundTask:
        work(context)
        return pipelined.BackgroundTask()

    monkeypatch.setattr(pipelined.BackgroundTask, "of", here)
    _, inline = rounds(model, drafter, request, length=4)
    assert [kept.tokens for kept in beside] == [kept.tokens for kept in inline]
    assert [kept.drafted for kept in beside] == [kept.drafted for kept in inline]


def test_an_error_beside_the_target_retires_the_drafter() -> None:
    model, copy = toys.model("llava", layers=2), toys.model("llava", layers=2)
    request, calls = toys.inputs("llava"), []

    def breaks(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("no more")

    copy.model.language_model.register_forward_pre_hook(breaks)
    fast = mmspec.accelerate(model, "pearl", drafter=copy)
    out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    assert "RuntimeError: no more" in str(out.stats.fallback)


@pytest.mark.parametrize("way", exhaustive([(0, 1), (3, 1), (0, 2)], {(3, 1)}), ids=str)
def test_rejection_keeps_the_distribution(way: tuple[int, int]) -> None:
    """A window is used only where its prefix was kept, so that its tokens stay draws from q.

    Chance of a false alarm: 1e-6 each.
    """
    refill, ahead = way
    plan = replace(recipes.get("pearl"), verifier=Recursive(), options={"refill": refill})
    fast = writers.bind_recipe(plan, 1)
    fast.session.bound.drafter = replace(fast.session.bound.drafter, window=3, ahead=ahead)
    found = measure_frequencies(writers.make_subject(fast), samples=3000)
    assert found.passes(1e-6), found


def test_the_clock_adds_up() -> None:
    def kept(drafted: int, finished: bool = False) -> Any:
        return Round(1, (drafted,), (), (), (), (), (finished,), None)  # type: ignore[arg-type]

    costs = ComponentCosts(draft=1.0, step=5.0, more=0.5)
    assert sequential_seconds([kept(4), kept(4)], costs) == 2 * (4 + 5 + 2)
    assert overlapped_seconds([kept(0), kept(3), kept(3)], costs, 4) == 5 + 2 * 6.5
    assert overlapped_seconds([kept(4), kept(3)], costs, 4, refill=4) == 4 + 7 + 6.5
    slow = ComponentCosts(draft=3.0, step=5.0, more=0.5)
    assert overlapped_seconds([kept(0), kept(3, finished=True)], slow, 4) == 12 + 6.5
    with pytest.raises(ValueError, match="refill=2 is neither 0 nor the window of 4"):
        overlapped_seconds([], costs, 4, refill=2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tree": [2, 2]}, "windows that are drafted ahead are chains of one length"),
        ({"length": "entropy"}, "chains of one length; give length= a number"),
        ({"length": 1}, "length=1 and refill=0 are not valid; give a length of 2 or more"),
        ({"refill": 9}, "length=4 and refill=9 are not valid"),
    ],
)
def test_what_cannot_be_drafted_ahead(parts: dict[str, Any], message: str) -> None:
    model, drafter = pair("llava")
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(model, "pearl", drafter=drafter, **parts)


def test_a_recurrent_drafter_cannot_forget() -> None:
    with pytest.raises(ValueError, match="its own cache that can be trimmed"):
        mmspec.accelerate(
            toys.model("llama", layers=2), "pearl", drafter=toys.model("lfm2", layers=2)
        )
