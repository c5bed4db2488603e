"""OSD: the draft model learns between requests, the output stays the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.drafters.neural import online
from tests import toys
from tests.partners import noisy
from tests.toys import image_models

ROOM = 16
TURNS = 6


def weights(model: Any) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).clone()


def serve(family: str, turns: int = TURNS, **settings: Any) -> tuple[list[int], Any]:
    """Target calls of the same request, time after time; every output is checked."""
    model, drafter = toys.model(family, layers=2), noisy(family, layers=2, scale=0.3)
    request = toys.inputs(family, batch=2, ragged=True)
    own = {"max_new_tokens": ROOM, **settings}
    expected = mmspec.decode_plain(model, **request, **own).sequences
    fast = mmspec.accelerate(model, "osd", drafter=drafter, rate=3e-3)
    calls = []
    for _ in range(turns):
        out = fast.generate(**request, **own)
        assert torch.equal(out.sequences, expected)
        calls.append(out.stats.target_calls)
    return calls, fast


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"do_sample": False}),
        pytest.param("llava", {"do_sample": False}, marks=pytest.mark.exhaustive),
        pytest.param("llama", {"temperature": 1.0, "seed": 5}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_output_stays_and_calls_become_fewer(family: str, settings: dict[str, Any]) -> None:
    calls, fast = serve(family, **settings)
    assert calls[-1] < calls[0] or "seed" in settings  # few of them are sampled otherwise
    learner = fast.session.bound.drafter.learner
    assert 0 < learner.num_updates <= TURNS
    assert not learner.examples


def test_an_answer_with_a_placeholder_is_learned_from_too() -> None:
    """A target may sample the placeholder of a picture, which then has no features."""
    model = toys.model("llava", layers=2)

    def force(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] % 4:
            return scores
        return torch.zeros_like(scores).index_fill_(1, torch.tensor([toys.IMAGE]), 99.0)

    request = toys.inputs("llava", batch=2, ragged=True)
    own = {"max_new_tokens": ROOM, "do_sample": False, "logits_processor": [force]}
    fast = mmspec.accelerate(model, "osd", drafter=noisy("llava", layers=2, scale=0.3))
    out = fast.generate(**request, **own)
    assert torch.equal(out.sequences, mmspec.decode_plain(model, **request, **own).sequences)
    assert toys.IMAGE in out.sequences[:, -ROOM:]
    assert out.stats.fallback is None
    assert fast.generate(**request, **own).stats.fallback is None
    assert fast.session.bound.drafter.learner.num_updates > 0


@pytest.mark.exhaustive
def test_what_is_learned_at_other_places_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the target's distributions, each for the token after."""
    right = serve("llama", do_sample=False)[0]
    loss = online.online_loss

    def shifted(reader: Any, example: Any) -> Tensor:
        steps = (example.steps + 1).clamp_max(example.tokens.shape[1] - 1)
        return loss(reader, replace(example, steps=steps))

    monkeypatch.setattr(online, "online_loss", shifted)
    assert serve("llama", do_sample=False)[0][-1] > right[-1]


def test_weights_are_frozen_while_a_request_runs() -> None:
    model, drafter = toys.model("llama", layers=2), noisy("llama", layers=2, scale=0.3)
    request = toys.inputs("llama")
    fast = mmspec.accelerate(model, "osd", drafter=drafter, rate=3e-3)
    before = weights(drafter)
    rounds = fast.stream(**request, max_new_tokens=ROOM, do_sample=False)
    next(rounds)
    next(rounds)
    assert torch.equal(weights(drafter), before)
    rounds.close()  # given up: nothing is learned, and the next request is not held up
    del rounds
    fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert not torch.equal(weights(drafter), before)
    assert not any(weight.grad is not None for weight in drafter.parameters())


def test_what_was_learned_is_saved_and_restored(tmp_path: Path) -> None:
    _, fast = serve("llama", turns=2, do_sample=False)
    fast.save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, toys.model("llama", layers=2))
    ours, theirs = (one.session.bound.drafter.learner.reader.model for one in (fast, again))
    assert torch.equal(weights(ours.model), weights(theirs.model))  # the toy's head is its own
    assert again.recipe.name == "osd"


@pytest.mark.parametrize(("option", "value"), [("every", 0), ("rate", -1.0)])
def test_what_is_no_setting_is_refused(option: str, value: float) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(ValueError, match=f"{option}={value} must be"):
        mmspec.accelerate(toys.model("llama"), "osd", drafter=toys.model("llama"), **given)


def test_half_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="load it in float32"):
        mmspec.accelerate(
            toys.model("llama"), "osd", drafter=toys.model("llama").to(torch.bfloat16)
        )


@pytest.mark.parametrize("shares_all", [True, False])
def test_weights_of_the_target_are_not_trained(shares_all: bool) -> None:
    model = toys.model("llama")
    drafter = model if shares_all else noisy("llama", scale=0.3)
    if not shares_all:
        drafter.set_input_embeddings(model.get_input_embeddings())
    with pytest.raises(ValueError, match=r"would change the target, .* such as .*embed_tokens"):
        mmspec.accelerate(model, "osd", drafter=drafter)


@pytest.mark.parametrize("recipe", ["osd", "uad"])
def test_prompts_that_are_no_text_cannot_be_read_again(recipe: str) -> None:
    with pytest.raises(ValueError, match=r"the prompts of Janus.* are not of its vocabulary"):
        mmspec.accelerate(image_models.janus(), recipe, drafter=image_models.janus())
