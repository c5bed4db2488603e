"""CTC-SSD on Granite-Speech: against a slow reference, at both ends of both thresholds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.codes.ctc import collapse, uncertainty
from tests import toys
from tests.covering import covering, limited
from tests.toys import granite

ROOM = 12
FALLBACKS = ("resume", "restart")
NEVER = {"tau_ctc": -1.0}


def asked(request: dict[str, Tensor], model: Any = None, **options: Any) -> Any:
    model = granite.model() if model is None else model
    fast = mmspec.accelerate(model, "ctc-ssd", tokenizer=granite.tokenizer(), **options)
    return fast.generate(**request, max_new_tokens=ROOM)


def new(sequences: Tensor, request: dict[str, Tensor]) -> list[list[int]]:
    """What each row says, up to its end."""
    rows = sequences[:, request["input_ids"].shape[1] :].tolist()
    return [row[: row.index(granite.END) + 1] if granite.END in row else row for row in rows]


def alone(request: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row without its padding."""
    seen = request["attention_mask"][row].bool()
    count = int(request["input_features_mask"][row].sum()) // granite.MADE * granite.WINDOW
    return {
        "input_ids": request["input_ids"][row : row + 1, seen],
        "input_features": request["input_features"][row : row + 1, :count],
    }


@torch.no_grad()
def heard(request: dict[str, Tensor], row: int) -> tuple[list[int], float]:
    """The encoder's text as tokens, and how unsure it was; rows are encoded together."""
    encoder = granite.model().model.encoder
    count = int(request["input_features_mask"][row].sum()) // granite.MADE * granite.WINDOW
    states = encoder(request["input_features"]).last_hidden_state[row, :count]
    distribution = encoder.out(states).log_softmax(-1)
    text = "".join(map(chr, collapse(distribution.argmax(-1).tolist()))).strip()
    tokens = granite.tokenizer()(text, add_special_tokens=False)["input_ids"]
    return tokens, float(uncertainty(distribution[None])[0])


@torch.no_grad()
def distribution_after(request: dict[str, Tensor], row: int, tokens: list[int]) -> Tensor:
    """p behind some tokens: a whole forward of the row alone, divided as it should be."""
    own = alone(request, row)
    ids = torch.cat((own["input_ids"], torch.tensor([tokens], dtype=torch.int64)), 1)
    out = granite.model()(input_ids=ids, input_features=own["input_features"])
    found: Tensor = (out.logits[0, -1] / granite.SCALING).softmax(-1)
    return found


def reference(
    request: dict[str, Tensor], row: int, tau_slm: float, restart: bool, check_end: bool
) -> list[int]:
    """Section by section as the method is written: draft, floor, go on greedily."""
    drafted = [*heard(request, row)[0], granite.END][:ROOM]
    said: list[int] = []
    for token in drafted:
        checked = check_end or token != granite.END
        if checked and float(distribution_after(request, row, said)[token]) < tau_slm:
            break
        said.append(token)
    if restart and len(said) < len(drafted):
        said = []
    while len(said) < ROOM and granite.END not in said:
        said.append(int(distribution_after(request, row, said).argmax()))
    return said


@pytest.mark.parametrize(
    ("fallback", "tau_slm"),
    limited(covering(FALLBACKS, [0.0, 0.02, 0.05, 0.3, 0.6], strength=1), 3),
)
def test_it_does_what_the_slow_reference_does(tau_slm: float, fallback: str) -> None:
    request = granite.inputs((3, 2, 3), seed=1)
    out = asked(request, **NEVER, tau_slm=tau_slm, fallback=fallback)
    for row, said in enumerate(new(out.sequences, request)):
        if int(request["input_features_mask"][row].sum()) != 3 * granite.MADE:
            continue  # the encoder hears padding beside a short sound, as the model's own does
        checks = fallback == "resume"
        assert said == reference(request, row, tau_slm, fallback == "restart", checks)


def test_thresholds_make_a_difference() -> None:
    """Some of the floors above keep a part, or the tests above could not fail."""
    request = granite.inputs((3, 3), seed=1)
    kept = [
        asked(request, **NEVER, tau_slm=floor).stats.num_accepted_draft_tokens
        for floor in (0.0, 0.02, 0.05, 0.3, 1.5)
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) >= 3
    assert kept[-1] == 0


@pytest.mark.parametrize(
    ("tau_slm", "fallback"), limited(covering((0.51, 0.6, 1.0, 1.5), FALLBACKS, strength=1), 2)
)
def test_a_floor_above_one_half_is_greedy_decoding(tau_slm: float, fallback: str) -> None:
    for seed in range(3):
        request = granite.inputs((3, 2), seed=seed)
        wanted = granite.model().generate(**request, max_new_tokens=ROOM, do_sample=False)
        out = asked(request, **NEVER, tau_slm=tau_slm, fallback=fallback, check_end=True)
        assert torch.equal(out.sequences, wanted)


def test_what_the_encoder_is_sure_of_never_reaches_the_language_model() -> None:
    request = granite.inputs((3, 3), seed=1)
    with counted() as calls:
        out = asked(request, tau_ctc=float("inf"))
    assert calls == {"encoder": 1, "language_model": 0}
    assert out.stats.target_calls == 0
    assert out.stats.unverified_tokens == out.stats.num_new_tokens
    for row, said in enumerate(new(out.sequences, request)):
        assert said == [*heard(request, row)[0], granite.END][:ROOM]


def test_the_encoder_runs_once_and_rows_pass_the_gate_alone() -> None:
    request = granite.inputs((3, 3), seed=1)
    unsure = [heard(request, row)[1] for row in range(2)]
    assert unsure[0] != unsure[1]
    between = sum(unsure) / 2
    asked(request, **NEVER)  # a class is asked how it reads on its first request
    with counted() as calls:
        out = asked(request, tau_ctc=between, tau_slm=0.6)
    assert calls["encoder"] == 1
    greedy = granite.model().generate(**request, max_new_tokens=ROOM, do_sample=False)
    greedy = greedy[:, request["input_ids"].shape[1] :].tolist()
    for row, said in enumerate(new(out.sequences, request)):
        if unsure[row] <= between:
            assert said == [*heard(request, row)[0], granite.END][:ROOM]
        else:
            assert said == greedy[row][: len(said)]
    looser = [asked(request, tau_ctc=tau).stats.unverified_tokens for tau in (0.0, between, 9.0)]
    assert looser == sorted(set(looser))


def test_a_forward_that_was_set_on_the_encoder_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = granite.model().model.encoder
    own = encoder.forward
    monkeypatch.setattr(encoder, "forward", lambda *args, **how: own(*args, **how))
    replaced = encoder.forward
    asked(granite.inputs((2,)))
    assert encoder.forward is replaced


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Forwards of the parts of the model."""
    inner = granite.model().model
    calls = dict.fromkeys(("encoder", "language_model"), 0)

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    first = {name: getattr(inner, name).layers[0] for name in calls}  # runs where a forward does
    hooks = [layer.register_forward_hook(count(name)) for name, layer in first.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def test_other_ways_to_ask() -> None:
    """Streamed, through transformers, with its cache, twice, and without a sound."""
    request, model = granite.inputs((3, 2), seed=1), granite.model()
    options = {**NEVER, "tau_slm": 0.05, "tokenizer": granite.tokenizer()}
    fast = mmspec.accelerate(model, "ctc-ssd", **options)
    wanted = fast.generate(**request, max_new_tokens=ROOM).sequences
    assert torch.equal(fast.generate(**request, max_new_tokens=ROOM).sequences, wanted)
    streamed: list[list[int]] = [[], []]
    for kept in fast.stream(**request, max_new_tokens=ROOM):
        for row, tokens in enumerate(kept.tokens):
            streamed[row] += tokens
    assert streamed == new(wanted, request)
    hooked = model.generate(**request, max_new_tokens=ROOM, custom_generate=fast)
    assert torch.equal(hooked, wanted)
    for tau in (-1.0, float("inf")):
        told = mmspec.accelerate(model, "ctc-ssd", **{**options, "tau_ctc": tau})
        one = {name: value[:1] for name, value in request.items()}
        plain = told.generate(**one, max_new_tokens=6)
        out = told.generate(**one, max_new_tokens=6, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain.sequences)
        assert out.past_key_values.get_seq_length() == out.sequences.shape[1] - 1
        more = out.sequences, {"attention_mask": torch.ones_like(out.sequences)}
        again = model.generate(
            more[0],
            **more[1],
            past_key_values=out.past_key_values,
            max_new_tokens=2,
            do_sample=False,
        )
        fresh = model.generate(
            more[0],
            **more[1],
            input_features=one["input_features"],
            input_features_mask=one["input_features_mask"],
            max_new_tokens=2,
            do_sample=False,
        )
        assert torch.equal(again, fresh)
    text = torch.tensor([[3, 5, 6, 3]])
    silent = fast.generate(input_ids=text, max_new_tokens=4)
    assert torch.equal(silent.sequences, model.generate(text, max_new_tokens=4, do_sample=False))


def test_a_head_that_says_tokens_needs_no_tokenizer() -> None:
    model, request = granite.model(labels=granite.SIZE + 1), granite.inputs((3,), seed=1)
    out = mmspec.accelerate(model, "ctc-ssd", tau_ctc=float("inf")).generate(
        **request, max_new_tokens=ROOM
    )
    distribution = model.model.encoder.out(
        model.model.encoder(request["input_features"]).last_hidden_state
    )
    said = [label - 1 for label in collapse(distribution[0].argmax(-1).tolist())]
    assert new(out.sequences, request)[0] == [*said, granite.END][:ROOM]


def test_sampling_draws_from_the_distribution_the_model_was_trained_for() -> None:
    """The class does not divide its logits, so `generate()` samples sharper distributions."""
    model, request = granite.model(), granite.inputs((3,))
    fast = mmspec.accelerate(model, "plain")
    sampled = {"max_new_tokens": 1, "do_sample": True, "output_scores": True}
    sampled["return_dict_in_generate"] = True
    out = fast.generate(**request, **sampled, seed=0)
    raw = model(**request).logits[:, -1]
    assert torch.allclose(out.scores[0], raw / granite.SCALING, atol=1e-5)
    own = model.generate(
        **request,
        max_new_tokens=1,
        do_sample=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert torch.allclose(own.scores[0], raw, atol=1e-5)
    wanted = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(fast.generate(**request, max_new_tokens=ROOM).sequences, wanted)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="LlavaForConditionalGeneration has none"):
        mmspec.accelerate(toys.model("llava"), "ctc-ssd")
    with pytest.raises(ValueError, match=r"tokenizer cannot be loaded .* give tokenizer="):
        mmspec.accelerate(granite.model(), "ctc-ssd")
    for option, says in (
        ({"fallback": "again"}, "fallback='again' is not known; choose resume or restart"),
        ({"tau_slm": -0.5}, "floor is -0.5"),
        ({"length": 3}, "drafts a whole text at once; do not give length="),
    ):
        with pytest.raises(ValueError, match=says):
            asked(granite.inputs(), **option)
