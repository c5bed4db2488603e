"""Many requests to one engine: each gets the tokens that it gets alone, or one clear error."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

import mmspec
from mmspec.decode import BrokenLogits
from mmspec.distributions.noise import KeyedNoise
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.serving.ticket import DeadlineExceeded, MemoryExceeded, QueueFull
from mmspec.targets.rows import RowStore
from mmspec.targets.tokens.causal import CausalTarget
from tests import toys
from tests.covering import exhaustive
from tests.partners import noisy, partner, skip_checks

LENGTHS = (1, 2, 4, 8, 12)
Request = dict[str, Any]


def accelerated(family: str, recipe: str, **parts: Any) -> Any:
    drafter = partner(recipe, family, layers=2)
    given = {} if drafter is None else {"drafter": drafter}
    return skip_checks(mmspec.accelerate(toys.model(family), recipe, **given, **parts))


def mixed_requests(family: str, count: int) -> list[Request]:
    """Prompts, pictures, limits and settings that differ, and seeds of their own."""
    choose, made = random.Random(count), list[Request]()
    for index in range(count):
        request: Request = dict(toys.inputs(family, seed=index % 7))
        if index % 3 == 0:  # a shorter one, without its last words
            request = {
                name: value[:, :-3] if value.shape[-1] == request["input_ids"].shape[-1] else value
                for name, value in request.items()
            }
        request |= {"max_new_tokens": choose.choice(LENGTHS), "seed": index}
        if index % 2:
            request |= {"temperature": choose.choice((0.7, 1.0)), "top_p": 0.9}
        else:
            request["do_sample"] = False
        made.append(request)
    return made


def compare_with_alone(fast: Any, requests: list[Request], max_rows: int = 4) -> float:
    """Check the output of every request; returns the mean number of rows per round."""
    expected = [fast.generate(**one).sequences for one in requests]
    order = list(range(len(requests)))
    random.Random(1).shuffle(order)
    with mmspec.Engine(fast, max_rows=max_rows, max_queue=len(requests)) as engine:
        futures = {index: engine.submit(requests[index]) for index in order}
        found = [futures[index].result(60) for index in range(len(requests))]
    wrong = [
        index for index, one in enumerate(found) if not torch.equal(one.sequences, expected[index])
    ]
    assert not wrong
    assert not [one.stats.fallback for one in found if one.stats.fallback]
    counters = engine.counters
    assert counters.completed == len(requests)
    assert counters.prompt_forwards <= len(requests)
    assert counters.new_tokens == sum(one.stats.num_new_tokens for one in found)
    return counters.row_rounds / counters.rounds


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("llava", 40),
        pytest.param("qwen2_5_vl", 20, marks=pytest.mark.exhaustive),
        pytest.param("llava", 100, marks=pytest.mark.exhaustive),
    ],
)
def test_requests_in_random_order_get_their_own_tokens(family: str, count: int) -> None:
    fast = accelerated(family, "coupled")
    assert compare_with_alone(fast, mixed_requests(family, count), max_rows=8) > 2


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("plain", {}),
        ("coupled", {"tree": "dynamic"}),
        ("eagle-3", {}),
        ("dflash", {}),
        ("block", {}),
        *(
            pytest.param(name, parts, marks=pytest.mark.exhaustive)
            for name, parts in (
                ("kangaroo", {}),
                ("prompt-lookup", {}),
                ("suffix", {}),
                ("coupled", {"length": "auto"}),
                ("p-eagle", {}),
                ("medusa", {}),
                ("hydra", {}),
                ("speculative-sampling", {}),
            )
        ),
    ],
)
def test_recipes(recipe: str, parts: dict[str, Any]) -> None:
    compare_with_alone(accelerated("llava", recipe, **parts), mixed_requests("llava", 6))


@pytest.mark.parametrize(
    "family",
    exhaustive(
        ("llama", "mistral-sliding", "gemma3", "idefics3", "qwen3_5", "lfm2"),
        ("mistral-sliding", "gemma3", "lfm2"),
    ),
)
def test_families(family: str) -> None:
    """Windows, recurrent layers and prompts of other kinds."""
    compare_with_alone(accelerated(family, "coupled"), mixed_requests(family, 5))


def test_noise_of_another_row_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows that take the noise of the row in their place."""
    fast = accelerated("llava", "coupled")
    requests = mixed_requests("llava", 9)

    def repeat_last(self: KeyedNoise, other: KeyedNoise, _: int) -> KeyedNoise:
        return KeyedNoise(torch.cat((self.rows, self.rows[-1:].expand(len(other.rows)))))

    monkeypatch.setattr(KeyedNoise, "join", repeat_last)
    with pytest.raises(AssertionError):
        compare_with_alone(fast, requests)


def test_processors_and_criteria_of_one_request_touch_no_other() -> None:
    class StopsAt(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> bool:
            return bool(input_ids.shape[1] >= 30)

    fast, requests = accelerated("llama", "coupled"), mixed_requests("llama", 6)
    requests[0] |= {"repetition_penalty": 1.4, "max_new_tokens": 12}
    requests[1] |= {"stopping_criteria": [StopsAt()], "max_new_tokens": 23}
    requests[2] |= {"min_new_tokens": 3, "eos_token_id": 9, "max_new_tokens": 12}
    compare_with_alone(fast, requests)


class Slow(StoppingCriteria):
    """Never stops, and takes its time for every token."""

    def __call__(self, *_: Any, **__: Any) -> bool:
        time.sleep(0.01)
        return False


def wait_until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def long_request(seed: int = 0, **more: Any) -> Request:
    return {
        **toys.inputs("llama", seed),
        "do_sample": False,
        "max_new_tokens": 400,
        "stopping_criteria": [Slow()],
        **more,
    }


def test_a_cancelled_request_leaves_and_the_others_go_on() -> None:
    fast, request = accelerated("llama", "plain"), mixed_requests("llama", 1)[0]
    expected = fast.generate(**request).sequences
    with mmspec.Engine(fast, max_rows=2) as engine:
        slow = engine.submit(long_request())
        wait_until(lambda: engine.num_running)
        other = engine.submit(request)
        assert slow.cancel()
        assert torch.equal(other.result(20).sequences, expected)
        with pytest.raises(CancelledError):
            slow.result(20)
        wait_until(lambda: not engine.num_running)
        assert engine.counters.cancelled == 1


def test_a_late_request_fails_with_its_tokens() -> None:
    with mmspec.Engine(accelerated("llama", "plain")) as engine:
        late = engine.submit(long_request(), timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=r"of at most \d+ tokens; give") as caught:
            late.result(20)
        assert 0 < len(caught.value.tokens) < 400
        wait_until(lambda: not engine.num_running)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    with mmspec.Engine(accelerated("llama", "plain"), max_rows=1, max_queue=1) as engine:
        running = engine.submit(long_request())
        wait_until(lambda: engine.num_running)
        waiting = engine.submit(long_request())
        with pytest.raises(QueueFull, match="max_queue=1") as caught:
            engine.submit(long_request())
        assert caught.value.retry_after_s > 0
        running.cancel()
        waiting.cancel()


def test_priorities_and_slots_decide_who_is_next() -> None:
    fast, order = accelerated("llama", "plain"), list[str]()
    small = {**toys.inputs("llama"), "do_sample": False, "max_new_tokens": 3}
    slots = toys.inputs("llama")["input_ids"].shape[1] + 400 + 64
    with mmspec.Engine(fast, max_rows=4, max_slots=slots) as engine:
        first = engine.submit(long_request())
        wait_until(lambda: engine.num_running)
        futures = list[Future[Any]]()
        for name, priority in (("low", 0), ("high", 5), ("middle", 2)):
            future = engine.submit(small, priority=priority)
            future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
            futures.append(future)
        assert engine.num_running == 1  # the others wait for slots
        first.cancel()
        for future in futures:
            future.result(20)
    assert order == ["high", "middle", "low"]
    with pytest.raises(ValueError, match="max_slots=50"), mmspec.Engine(fast, max_slots=50) as few:
        few.submit(small)


def test_errors_of_one_row_stay_its_own() -> None:
    """A criterion that raises, an observer that raises, and logits that are NaN for one prompt."""
    model = toys.model("llama")
    fast = skip_checks(mmspec.accelerate(model, "coupled", drafter=noisy("llama")))

    class Raises(StoppingCriteria):
        def __call__(self, input_ids: Any, *_: Any, **__: Any) -> bool:
            raise RuntimeError("criterion")

    def observe(_: Any) -> None:
        raise RuntimeError("observer")

    requests = mixed_requests("llama", 5)
    expected = [fast.generate(**one).sequences for one in requests]
    with mmspec.Engine(fast, max_rows=8) as engine:
        wrong = engine.submit({**requests[0], "stopping_criteria": [Raises()]})
        watched = engine.submit(requests[1], on_round=observe)
        poison = toys.inputs("llama", 3)["input_ids"].clone()
        poison[0, 0] = 17
        table = model.get_input_embeddings().weight
        with torch.no_grad():
            saved, table[17] = table[17].clone(), float("nan")
        broken = engine.submit({"input_ids": poison, "max_new_tokens": 9, "do_sample": False})
        with pytest.raises(BrokenLogits):
            broken.result(20)
        with torch.no_grad():
            table[17] = saved
        found = [engine.submit(one) for one in requests]
        assert all(
            torch.equal(one.result(20).sequences, own)
            for one, own in zip(found, expected, strict=True)
        )
        for future, message in ((wrong, "criterion"), (watched, "observer")):
            with pytest.raises(RuntimeError, match=message):
                future.result(20)
    assert engine.counters.failed == 3


def test_a_drafter_that_fails_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding finishes the rows of its batch; later requests are drafted again."""
    fast, requests = accelerated("llama", "coupled"), mixed_requests("llama", 8)
    expected = [fast.generate(**one).sequences for one in requests]
    propose, calls = Autoregressive.propose, iter(range(1000))

    def fail_once(self: Any, context: Any, state: Any) -> Any:
        if context.batch > 1 and next(calls) == 0:
            raise RuntimeError("out of ideas")
        return propose(self, context, state)

    with mmspec.Engine(fast, max_rows=4) as engine:
        monkeypatch.setattr(Autoregressive, "propose", fail_once)
        found = [future.result(20) for future in [engine.submit(one) for one in requests]]
        assert all(map(torch.equal, (one.sequences for one in found), expected))
        assert any("out of ideas" in (one.stats.fallback or "") for one in found)
        after = engine.submit({**requests[0], "max_new_tokens": 12}).result(20)
        assert after.stats.num_draft_tokens


def test_a_stream_yields_verified_tokens_and_closing_it_cancels() -> None:
    fast, request = accelerated("llama", "coupled"), mixed_requests("llama", 4)[3]
    expected = fast.generate(**request)
    with mmspec.Engine(fast) as engine:
        stream, tokens = engine.stream(request, logprobs=2), list[int]()
        while True:
            try:
                tokens += next(stream).tokens[0]
            except StopIteration as end:
                done = end.value
                break
        assert tokens == done.tokens == expected.sequences[0, -len(tokens) :].tolist()
        assert done.stats.num_accepted_draft_tokens == expected.stats.num_accepted_draft_tokens
        assert len(done.token_scores) == len(tokens)
        for score, best in done.token_scores:
            assert score <= best[0][1] + 1e-6
            assert len(best) == 2
        slow = engine.stream(long_request())
        next(slow)
        slow.close()
        wait_until(lambda: not engine.num_running)
        assert engine.counters.cancelled == 1


def test_closing_finishes_what_was_taken_or_cancels_it() -> None:
    fast, request = accelerated("llama", "plain"), mixed_requests("llama", 1)[0]
    engine = mmspec.Engine(fast)
    futures = [engine.submit(request) for _ in range(3)]
    engine.close()
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="closed"):
        engine.submit(request)
    engine = mmspec.Engine(fast)
    future = engine.submit(long_request())
    engine.close(finish=False)
    assert future.cancelled()
    assert not [one for one in threading.enumerate() if one.name == "mmspec-engine"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("sjd", "JacobiWindow"), ("hsd", "_GivenTextState"), ("ugsd", "gate")],
)
def test_recipes_that_cannot_join_are_refused_at_construction(recipe: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.Engine(accelerated("llava", recipe))


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="accelerate"):
        mmspec.Engine(toys.model("llama"))
    whisper = r"in its own generate\(\), which an engine cannot call; call fast.generate"
    with pytest.raises(ValueError, match=whisper):
        mmspec.Engine(accelerated("whisper", "plain"))
    fast = accelerated("llama", "plain")
    with pytest.raises(ValueError, match="max_rows=0"):
        mmspec.Engine(fast, max_rows=0)
    with mmspec.Engine(fast) as engine:
        two = {**toys.inputs("llama", batch=2), "max_new_tokens": 3}
        with pytest.raises(ValueError, match="2 rows"):
            engine.submit(two)
        one = {**toys.inputs("llama"), "max_new_tokens": 3}
        with pytest.raises(ValueError, match="output_scores"):
            engine.submit({**one, "output_scores": True})
        for seconds in (0, True):
            with pytest.raises(ValueError, match=f"timeout_s={seconds}"):
                engine.submit(one, timeout_s=seconds)
        for name, value in (("max_new_tokens", 0), ("seed", True), ("row_ids", [True])):
            with pytest.raises(ValueError, match=name):
                engine.submit({**one, name: value})


@pytest.mark.parametrize(
    "part", ["score", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("prefill", "join"))]
)
def test_memory_that_is_short_lets_requests_begin_again(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request has its tokens, observed once each; fewer run at a time."""
    fast, requests = accelerated("llava", "coupled"), mixed_requests("llava", 16)
    expected = [fast.generate(**one).sequences for one in requests]
    owner: Any = RowStore if part == "join" else CausalTarget
    run, calls = getattr(owner, part), iter(range(1000))

    def fail_sometimes(self: Any, *given: Any) -> Any:
        if next(calls) in (3, 4, 9):
            raise torch.OutOfMemoryError("no memory")
        return run(self, *given)

    seen: dict[int, list[int]] = {index: [] for index in range(len(requests))}
    with mmspec.Engine(fast, max_rows=6, max_queue=len(requests)) as engine:
        monkeypatch.setattr(owner, part, fail_sometimes)

        def observe(index: int, round_: Any) -> None:
            seen[index].extend(round_.tokens[0])

        futures = [
            engine.submit(one, on_round=partial(observe, index))
            for index, one in enumerate(requests)
        ]
        found = [future.result(20) for future in futures]
    assert all(map(torch.equal, (one.sequences for one in found), expected))
    assert [one.tokens for one in found] == list(seen.values())
    counters = engine.counters
    assert counters.new_tokens == sum(len(one.tokens) for one in found)
    assert counters.restarted or part == "prefill"  # a group of prompts is read one by one
    assert not counters.failed


def test_a_request_beyond_memory_names_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, prefill = accelerated("llama", "plain"), CausalTarget.prefill

    def fail_beyond(self: Any, request: Any) -> Any:
        if request.inputs["input_ids"].shape[1] > 40:
            raise torch.OutOfMemoryError("no memory")
        return prefill(self, request)

    with mmspec.Engine(fast) as engine:
        monkeypatch.setattr(CausalTarget, "prefill", fail_beyond)
        small: Request = {**toys.inputs("llama"), "do_sample": False, "max_new_tokens": 3}
        engine.submit(small).result(20)
        large = {**small, "input_ids": small["input_ids"].repeat(1, 8), "attention_mask": None}
        slots = small["input_ids"].shape[1] + 3
        message = rf"{large['input_ids'].shape[1]} of its prompt.* that ran filled {slots}"
        with pytest.raises(MemoryExceeded, match=message):
            engine.submit(large).result(20)
        engine.submit(small).result(20)
