"""Consistency training: trajectories of Jacobi iteration, and a loss that shortens them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

import mmspec
from mmspec.training import cllm
from mmspec.training.cllm import (
    Trajectory,
    block_logits,
    consistency_loss,
    iterate,
    record_trajectories,
    train_consistency,
)
from tests import toys
from tests.drafters.driving import greedy, inputs, tiny


def test_trajectories_lead_to_the_greedy_answer() -> None:
    """Every state follows from the last by plain forwards, and one more token is final in each."""
    model, request = tiny(), inputs()
    (answer,) = greedy(model, request, 7)
    found = record_trajectories(model, [request | {"top_k": 3}], 4, 7, repeats=2, never=(5, 6))
    assert [one.inputs["input_ids"].shape[1] for one in found] == [12, 12, 16, 16]
    for one in found:
        start = one.inputs["input_ids"].shape[1] - 12
        wanted = answer[start : start + 4]
        assert one.states[-1].tolist() == wanted
        assert not {5, 6} & set(one.states[0].tolist())
        for step, (state, after) in enumerate(zip(one.states, one.states[1:], strict=False)):
            text = torch.cat((one.inputs["input_ids"], state[None]), 1)
            size = len(wanted)
            logits = model(input_ids=text).logits[0, -size - 1 : -1]
            logits[:, [5, 6]] = -torch.inf
            assert torch.equal(logits.argmax(-1), after)
            assert after[: step + 1].tolist() == wanted[: step + 1]
    assert not torch.equal(found[0].states[0], found[1].states[0])


def test_a_fixed_point_is_one() -> None:
    """Negative control: a state that is not the answer changes."""
    model, request = tiny(), inputs()
    states = iterate(model, request, 4)
    for state, is_fixed in ((states[-1], True), (states[0], False)):
        assert (
            torch.equal(block_logits(model, request, state[None]).argmax(-1)[0], state) is is_fixed
        )


def test_the_loss_is_that_of_the_tokens_after_the_first_difference() -> None:
    """By hand: of 5, 6, 7, 8 and 5, 9, 7, 8 the last two tokens have other prefixes."""
    model, request = tiny(), inputs()
    states = torch.tensor([[5, 9, 7, 8], [5, 6, 7, 8]])
    example = Trajectory(request, states)
    wanted, found = (block_logits(model, request, states[row : row + 1])[0] for row in (1, 0))
    answer = functional.cross_entropy(wanted, states[1])
    p, q = wanted.log_softmax(-1), found.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(divergence[:2], torch.zeros(2), atol=1e-5, rtol=0)
    loss = consistency_loss(model, example, 0, answer_weight=2.0)
    torch.testing.assert_close(loss, divergence[2:].mean() + 2 * answer)
    torch.testing.assert_close(consistency_loss(model, example, 1, answer_weight=2.0), 2 * answer)


def test_the_fixed_point_carries_no_gradient_of_consistency() -> None:
    model, request = tiny().requires_grad_(True), inputs()
    example = Trajectory(request, torch.tensor([[5, 9, 7], [5, 6, 7]]))
    consistency_loss(model, example, 0, answer_weight=0.0).backward()
    own = model.lm_head.weight.grad.clone()
    model.zero_grad()
    states = example.states
    fixed = block_logits(model, request, states[1:]).detach()[0, 2].log_softmax(-1)
    now = block_logits(model, request, states[:1])[0, 2].log_softmax(-1)
    functional.kl_div(now, fixed, reduction="sum", log_target=True).backward()
    torch.testing.assert_close(own, model.lm_head.weight.grad)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="a request has 2 rows"):
        record_trajectories(tiny(), [inputs((0, 3))])
    with pytest.raises(ValueError, match=r"weights of torch\.bfloat16"):
        train_consistency(copy.deepcopy(tiny()).bfloat16(), [])


def tokens_per_call(model: Any, request: dict[str, torch.Tensor]) -> float:
    """Over several seeds, which decide the random slots; the output is that of plain decoding."""
    fast = mmspec.accelerate(model, "cllm", length=7)
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    wanted, calls = model.generate(**request, **settings), 0
    for seed in range(6):
        out = fast.generate(**request, **settings, seed=seed)
        assert torch.equal(out.sequences, wanted)
        calls += out.stats.target_calls
    return 6 * 16 / calls


@pytest.mark.slow
def test_a_trained_target_needs_fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the cross entropy alone, on the same trajectories, does not."""
    request = {name: one[:1] for name, one in toys.inputs("llama").items()}
    found = dict[str, float]()
    losses = list[float]()
    for name in ("consistency", "answers alone"):
        model = copy.deepcopy(toys.model("llama"))
        found["before"] = tokens_per_call(model, request)
        examples = record_trajectories(model, [request], 8, 16)
        if name == "answers alone":
            monkeypatch.setattr(
                cllm,
                "consistency_loss",
                lambda model, example, state, weight: consistency_loss(
                    model, example, len(example.states) - 1, weight
                ),
            )
        trained = train_consistency(model, examples, 200, 3e-3, answer_weight=1.0)
        found[name] = tokens_per_call(model, request)
        losses = losses or trained.losses
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    assert found["consistency"] > found["before"] + 0.2
    assert found["consistency"] > found["answers alone"] + 0.1
