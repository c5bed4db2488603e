"""A small decoder on the target's encoder: the target's tokens, and one encoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mmspec
from mmspec.drafters.recycling_chain import RecyclingChain
from mmspec.targets.tokens.late import JointPrefill
from tests import toys
from tests.covering import covering, limited
from tests.modalities.speech.recognisers import RATE_HZ, noise, processor, whisper
from tests.partners import noisy

ROOM = 20
SHAPES: list[dict[str, Any]] = [{"length": 4}, {"tree": [2, 2, 1]}]


@cache
def target() -> Any:
    return toys.model("whisper")


def decoder_of(model: Any) -> Any:
    """Its decoder alone, as Distil-Whisper is used."""
    alone = transformers.WhisperForCausalLM(copy.deepcopy(model.config)).eval()
    alone.model.decoder.load_state_dict(model.model.decoder.state_dict())
    alone.proj_out = model.proj_out
    return alone


def sharing() -> Any:
    """A whole model with the target's encoder and a decoder of its own."""
    made = noisy("whisper", 0.1)
    made.get_encoder().load_state_dict(target().get_encoder().state_dict())
    return made


@contextmanager
def count_decodes(model: Any) -> Iterator[list[None]]:
    """One entry per forward of a model's decoder."""
    calls: list[None] = []
    hook = model.get_decoder().register_forward_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "a decoder alone": (lambda: decoder_of(noisy("whisper", 0.1)), "encoder"),
    "the same encoder": (sharing, "encoder"),
    "an encoder of its own": (lambda: noisy("whisper", 0.1), "pixels"),
}


@contextmanager
def count_encodes(*models: Any) -> Iterator[list[int]]:
    """Number of runs of each model's encoder."""
    counts = [0] * len(models)

    def count(at: int) -> Any:
        def hook(*_: Any) -> None:
            counts[at] += 1

        return hook

    handles = [
        model.get_encoder().conv1.register_forward_hook(count(at))
        for at, model in enumerate(models)
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("name", "shape"), limited(covering(tuple(MODELS), SHAPES, strength=1), 2), ids=str
)
def test_four_ragged_rows_are_the_targets(name: str, shape: dict[str, Any]) -> None:
    make, sees = MODELS[name]
    fast = mmspec.accelerate(target(), "whisper-assisted", drafter=make(), **shape)
    assert fast.sees == sees
    request = toys.inputs("whisper", batch=4)
    out = fast.generate(**request, max_new_tokens=ROOM)
    expected = target().generate(**request, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences, expected)
    drawn = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 2}
    plain = mmspec.decode_plain(target(), **request, **drawn)
    assert torch.equal(fast.generate(**request, **drawn).sequences, plain.sequences)
    assert out.stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("batch", [1, 4])
def test_a_prompt_is_read_with_its_first_draft(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, long = target(), RecyclingChain(64, 0.0)
    fast = mmspec.accelerate(model, "whisper-assisted", drafter=decoder_of(model), tree=long)
    request = {**toys.inputs("whisper", batch=batch), "max_new_tokens": ROOM}
    expected = model.generate(**request, do_sample=False)
    fast.generate(**request)  # asks whether the class reads both alike
    counts = []
    for agrees in (True, False):
        monkeypatch.setattr(JointPrefill, "is_trusted", agrees)
        with count_decodes(model) as calls:
            assert torch.equal(fast.generate(**request).sequences, expected)
        counts.append(len(calls))
    assert counts == [1, 2]


def test_the_sound_is_encoded_once() -> None:
    small = sharing()
    fast = mmspec.accelerate(target(), "whisper-assisted", drafter=small)
    fast.generate(**toys.inputs("whisper"), max_new_tokens=2)  # checks how the class is read
    with count_encodes(target(), small) as counts:
        fast.generate(**toys.inputs("whisper"), max_new_tokens=ROOM)
    assert counts == [1, 0]
    own = noisy("whisper", 0.1)
    with count_encodes(target(), own) as counts:
        mmspec.accelerate(target(), "coupled", drafter=own).generate(
            **toys.inputs("whisper"), max_new_tokens=ROOM
        )
    assert counts == [1, 1]


@pytest.mark.exhaustive
def test_transcripts_with_a_small_decoder() -> None:
    model = whisper()
    fast = mmspec.accelerate(
        model, "whisper-assisted", drafter=decoder_of(whisper(1, 1)), processor=processor()
    )
    plain = mmspec.accelerate(model, "plain", processor=processor())
    clips = [noise(seconds, at) for at, seconds in enumerate((0.3, 1.0, 3.0))]
    falls = {"temperature": (0.0, 0.5), "logprob_threshold": 0.0, "seed": 3}  # for sure
    previous = {"condition_on_prev_tokens": True, "timestamps": True}
    few: dict[str, Any] = {"max_new_tokens": 8}
    one = {"max_new_tokens": 1}
    for how in (few, {"timestamps": True, **few}, one, {**previous, **few}, falls | few):
        ours, theirs = (
            way.transcribe(clips, sampling_rate=RATE_HZ, **how) for way in (fast, plain)
        )
        assert ours.transcripts == theirs.transcripts


def test_a_saved_decoder_is_loaded_alone(tmp_path: Path) -> None:
    model, small = whisper(), decoder_of(whisper(1, 1))
    fast = mmspec.accelerate(model, "whisper-assisted", drafter=small)
    fast.save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, model)
    assert (fast.sees, again.sees) == ("encoder", "encoder")
    saved = again.session.bound.draft_model.model
    assert type(saved) is transformers.WhisperForCausalLM
    for name, value in small.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value)


def test_a_decoder_of_another_width_is_refused() -> None:
    config = copy.deepcopy(target().config)
    config.d_model = 32
    with pytest.raises(ValueError, match=r"64 wide.*reads 32"):
        mmspec.accelerate(
            target(), "whisper-assisted", drafter=transformers.WhisperForCausalLM(config)
        )


def test_a_decoder_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"float32.*float16.*load both alike"):
        mmspec.accelerate(target(), "whisper-assisted", drafter=decoder_of(noisy("whisper")).half())


def test_the_encoder_is_compared_by_its_weights() -> None:
    other = sharing()
    with torch.no_grad():
        other.get_encoder().conv1.weight[0, 0, 0] += 1e-3
    assert mmspec.accelerate(target(), "whisper-assisted", drafter=other).sees == "pixels"
    asked = mmspec.accelerate(target(), "whisper-assisted", drafter=sharing(), sees="pixels")
    assert asked.sees == "pixels"


def test_inside_generate_a_draft_model_hears_what_it_is_given() -> None:
    """`generate()` hands on what the target's encoder made, which no other decoder understands."""
    model, small, request = target(), toys.model("whisper", d_model=32), toys.inputs("whisper")
    fast = mmspec.accelerate(model, "coupled", drafter=small)
    expected = model.generate(**request, max_new_tokens=ROOM)
    made = model.generate(
        **request, max_new_tokens=ROOM, custom_generate=fast, drafter_inputs=dict(request)
    )
    assert torch.equal(made, expected)
    assert fast.last_stats is not None
    assert fast.last_stats.fallback is None
