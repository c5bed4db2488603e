"""Judges are trained on refused tokens that do or do not change the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.training import judges
from mmspec.training.judges import RefusalRecorder, fit_judge, same_end, train_judge
from tests import toys
from tests.partners import noisy

ROOM = 10


def bind(verifier: Any) -> mmspec.Accelerated:
    drafter = noisy("llama", scale=0.3)
    return mmspec.accelerate(
        toys.model("llama"), "speculative-sampling", drafter=drafter, verifier=verifier
    )


def test_states_that_tell_harmless_tokens_apart_are_learned() -> None:
    noise = torch.Generator().manual_seed(0)
    labels = torch.rand(200, generator=noise) < 0.6
    states = torch.randn(200, 8, generator=noise)
    states[:, 3] += 6 * labels
    found = fit_judge(states, labels, steps=60)
    assert found.recall >= 0.9
    assert found.saved > 0.9
    blind = fit_judge(torch.randn(200, 8, generator=noise), labels, steps=60)
    assert blind.recall >= 0.9  # what it cannot tell apart stays refused
    assert blind.saved < 0.5


def test_answers_that_end_alike_are_the_same() -> None:
    assert same_end(2)([1, 7, 8], [5, 7, 8])
    assert not same_end(0)([1, 7, 8], [5, 7, 8])


def test_refusals_are_put_back_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused token is not the target's; it is judged by the answer that continues from it."""
    model, request = toys.model("llama"), toys.inputs("llama", seed=1)
    start = request["input_ids"].shape[1]
    answer = model.generate(**request, max_new_tokens=ROOM)[0, start:].tolist()
    recorder = RefusalRecorder()
    bind(recorder).generate(**request, max_new_tokens=ROOM)
    one = next(refusal for refusal in recorder.found if refusal.place < ROOM - 2)
    assert one.token != answer[one.place]
    before = torch.tensor([[*answer[: one.place], one.token]])
    ids = torch.cat((request["input_ids"], before), 1)
    states = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
    torch.testing.assert_close(one.state, states, atol=1e-4, rtol=1e-4)
    seen: list[list[int]] = []
    monkeypatch.setattr(judges, "fit_judge", lambda states, labels, *_: labels.tolist())

    def is_same(new: Any, old: Any) -> bool:
        seen.append(list(new))
        assert list(old) == answer
        return len(seen) % 2 == 0

    labels: Any = train_judge(bind, [request], is_same, ROOM)
    assert labels == [place % 2 == 1 for place in range(len(labels))]
    wanted = model.generate(ids, max_new_tokens=ROOM - one.place - 1)[0, start:].tolist()
    assert wanted in seen
    with pytest.raises(ValueError, match=r"all .* refused tokens are harmless"):
        train_judge(bind, [request], lambda new, old: True, ROOM)


def test_a_refused_end_of_sequence_ends_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge that accepts it ends the answer there, so that is the answer to compare."""
    request, recorder = toys.inputs("llama", seed=1), RefusalRecorder()
    fast = bind(recorder)
    out = fast.generate(**request, max_new_tokens=ROOM)
    answer = out.sequences[0, request["input_ids"].shape[1] :].tolist()
    one = recorder.found[0]
    assert one.place < ROOM - 1
    monkeypatch.setattr(fast.model.generation_config, "eos_token_id", [one.token])
    settings = {"do_sample": False, "max_new_tokens": ROOM}
    found = judges._continue_from(fast, request, answer, one, settings)
    assert found == [*answer[: one.place], one.token]
