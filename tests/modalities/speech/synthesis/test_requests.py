"""Speech of language models: what is said, when it can be heard, and what is refused."""

from __future__ import annotations

import wave
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import mmspec
from mmspec.cli.models import select
from mmspec.cli.options import ModelOptions
from mmspec.decode import BrokenLogits
from mmspec.draft import Round
from mmspec.modalities.speech.codecs import Codec
from tests.covering import covering, limited
from tests.toys import speech_models

ROOM = {"max_new_tokens": 14, "min_new_tokens": 8}
VOICES = ["anna", "ben"]


def synthesize(fast: mmspec.Accelerated, **given: Any) -> Any:
    return fast.synthesize(speech_models.TEXTS, **{"voice": VOICES, "seed": 3, **ROOM, **given})


def codes(out: Any) -> list[Any]:
    return [row.tolist() for row in out.codes]


GIVEN: list[dict[str, Any]] = [{}, {"top_k": 3}, {"repetition_aware": True}]


@pytest.mark.parametrize(
    ("given", "recipe"),
    limited(covering(GIVEN, ("coupled", "prompt-lookup"), strength=1), 2),
    ids=str,
)
def test_a_seed_says_what_plain_decoding_says(recipe: str, given: dict[str, Any]) -> None:
    fast = speech_models.accelerated_speaker(recipe)
    found, wanted = (
        synthesize(fast, **given),
        synthesize(speech_models.accelerated_speaker(), **given),
    )
    assert codes(found) == codes(wanted)
    assert codes(found)[0] != codes(found)[1]
    for mine, other in zip(found.waveforms, wanted.waveforms, strict=True):
        assert torch.equal(mine, other)
    assert recipe != "coupled" or found.stats.num_accepted_draft_tokens > 0
    assert codes(synthesize(fast, **given, row_ids=[1, 0])) != codes(found)


def test_greedy_speech_is_that_of_generate() -> None:
    fast = speech_models.accelerated_speaker("coupled")
    found = synthesize(fast, temperature=0.0)
    request = fast.session.prepare_arguments(
        (speech_models.TEXTS,), {"voice": VOICES, "temperature": 0.0, **ROOM}
    )
    ids = speech_models.speaker().generate(**request)[:, request["input_ids"].shape[1] :].tolist()
    for row, mine in zip(ids, codes(found), strict=True):
        spoken = [
            one - speech_models.LAYOUT.first for one in row if one >= speech_models.LAYOUT.first
        ]
        assert mine == [spoken]


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False, "top_p": 0.5},
        pytest.param({"temperature": 0.1}, marks=pytest.mark.exhaustive),
        pytest.param({"top_k": 2}, marks=pytest.mark.exhaustive),
        {"max_new_tokens": 5, "min_new_tokens": 3},
        {"temperature": 0.1, "repetition_aware": True},
    ],
    ids=str,
)
def test_a_configuration_of_the_request_says_what_its_settings_say(given: dict[str, Any]) -> None:
    fast = speech_models.accelerated_speaker("coupled")
    own = {name: one for name, one in given.items() if name == "repetition_aware"}
    config = GenerationConfig(**{name: one for name, one in given.items() if name not in own})
    how: dict[str, Any] = {"voice": VOICES, "seed": 3, **own}
    room = {} if "max_new_tokens" in given else ROOM
    found = fast.synthesize(speech_models.TEXTS, generation_config=config, **how, **room)
    assert codes(found) == codes(fast.synthesize(speech_models.TEXTS, **{**how, **room, **given}))
    assert codes(found) != codes(fast.synthesize(speech_models.TEXTS, **how, **ROOM))


def test_the_models_own_call_says_the_same_codes() -> None:
    """`generate` of tokens, and the hook of transformers, with the arguments of `synthesize`."""
    fast = speech_models.accelerated_speaker("coupled")
    given = {"voice": VOICES, **ROOM}
    request = {**fast.session.prepare_arguments((speech_models.TEXTS,), given), "seed": 3}
    start = request["input_ids"].shape[1]
    mine = fast.generate(**request).sequences[:, start:].tolist()
    theirs = speech_models.speaker().generate(**request, custom_generate=fast)[:, start:].tolist()
    spoken = [
        [code + speech_models.LAYOUT.first for code in row[0]] for row in codes(synthesize(fast))
    ]
    for row, one, other in zip(spoken, mine, theirs, strict=True):
        assert one == other
        assert one[: len(row)] == row
    assert codes(synthesize(fast)) == codes(synthesize(fast))  # a second call on the same object


def test_a_row_does_not_depend_on_its_company() -> None:
    fast = speech_models.accelerated_speaker("coupled")
    alone = fast.synthesize(text=speech_models.TEXTS[1], voice="ben", seed=3, row_ids=[1], **ROOM)
    assert codes(alone)[0] == codes(synthesize(fast))[1]


@pytest.mark.parametrize(
    "codec", [speech_models.codec(), speech_models.dac()], ids=["causal", "looks ahead"]
)
def test_a_stream_is_the_sound_of_verified_frames_alone(codec: Any) -> None:
    fast, reader = speech_models.accelerated_speaker("coupled", codec=codec), Codec.of(codec)
    assert (reader.lookahead > 0) == (codec is speech_models.dac())
    assert (
        reader.final_samples(reader.min_frames - 1)
        == 0
        < reader.final_samples(reader.min_frames + 20)
    )
    verified: list[list[int]] = [[], []]
    heard = [torch.zeros(0)] * 2
    rounds = fast.stream(speech_models.TEXTS, voice=VOICES, seed=3, **ROOM)
    for kept in rounds:
        for said, new in zip(verified, kept.tokens, strict=True):
            said.extend(new)
        now = kept.partial()
        for row, (before, after) in enumerate(zip(heard, now, strict=True)):
            assert len(after) <= len(verified[row]) * reader.hop
            assert torch.allclose(after[: len(before)], before, atol=1e-5)
        heard = now
    wanted = synthesize(fast)
    for mine, whole in zip(heard, wanted.waveforms, strict=True):
        assert torch.allclose(mine, whole, atol=1e-5)


def rounds_until_sound(fast: mmspec.Accelerated) -> int:
    for kept in fast.stream(speech_models.TEXTS[0], seed=3, **ROOM):
        if len(kept.partial()[0]):
            return kept.index
    raise AssertionError("nothing was heard")


@pytest.mark.parametrize(
    "codec", [speech_models.codec(), speech_models.dac()], ids=["causal", "looks ahead"]
)
def test_the_first_sound_is_not_late(codec: Any) -> None:
    plain, fast = (
        speech_models.accelerated_speaker(name, codec=codec) for name in ("plain", "coupled")
    )
    heard = rounds_until_sound(fast)
    assert heard <= rounds_until_sound(plain) + 1
    stats = fast.synthesize(speech_models.TEXTS[0], seed=3, **ROOM).stats
    assert stats.first_audio_round == heard + 1  # whether it is observed or not


def test_a_stream_may_be_broken_off_and_another_begun() -> None:
    fast = speech_models.accelerated_speaker("coupled")
    first = fast.stream(speech_models.TEXTS, voice=VOICES, seed=3, **ROOM)
    next(first)
    first.close()
    whole = fast.stream(speech_models.TEXTS, voice=VOICES, seed=3, **ROOM)
    *_, last = whole
    assert codes(synthesize(fast)) == codes(synthesize(speech_models.accelerated_speaker()))
    assert torch.equal(last.partial()[0], synthesize(fast).waveform)


def test_the_run_reports_when_it_could_be_heard() -> None:
    fast = speech_models.accelerated_speaker("coupled")
    out = synthesize(fast)
    stats: Any = out.stats
    assert stats.first_audio_ms > 0
    assert stats.jitter_ms >= 0
    assert stats.audio_seconds == sum(map(len, out.waveforms)) / out.sampling_rate
    assert fast.last_stats is stats
    for row, turns in zip(out.codes, out.rounds, strict=True):
        assert len(turns) == row.shape[1]
        assert turns.diff().min() >= 0


@pytest.mark.parametrize(
    "codec", [speech_models.codec(), speech_models.dac()], ids=["causal", "looks ahead"]
)
def test_the_first_audio_is_there_when_it_is_decoded(
    codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is observed or not; time of the listener after it does not count."""
    fast, delay = speech_models.accelerated_speaker("coupled", codec=codec), 0.05
    synthesize(fast)  # measures the codec
    decode = Codec.decode

    def slow(self: Codec, codes: torch.Tensor) -> torch.Tensor:
        sleep(delay)
        return decode(self, codes)

    monkeypatch.setattr(Codec, "decode", slow)
    begun, heard = perf_counter(), None
    for step in fast.stream(speech_models.TEXTS, voice=VOICES, seed=3, **ROOM):
        if any(map(len, step.partial())) and heard is None:
            heard = perf_counter() - begun
            sleep(4 * delay)
    assert heard is not None
    assert fast.last_stats is not None
    first = fast.last_stats.first_audio_ms
    assert first is not None
    assert 1e3 * delay < first < 1e3 * heard < first + 2e3 * delay
    first = synthesize(fast).stats.first_audio_ms
    assert first > 1e3 * delay


def test_a_folder_speaks_and_writes(tmp_path: Path) -> None:
    folder = speech_models.save_checkpoint(tmp_path / "model")
    fast = mmspec.accelerate(folder, "plain")
    assert fast.modality.name == "tts"
    out = synthesize(fast)
    assert codes(out) == codes(synthesize(speech_models.accelerated_speaker()))
    files = out.save(tmp_path / "said.wav")
    assert [file.name for file in files] == ["said-0.wav", "said-1.wav"]
    with wave.open(str(files[0])) as file:
        assert file.getnframes() == len(out.waveform)
        assert file.getframerate() == out.sampling_rate
    assert fast.synthesize("red", seconds=0.05).codes[0].shape[1] <= 7  # 8 ms per frame


def test_a_folder_may_have_another_codec_beside_its_weights(tmp_path: Path) -> None:
    folder = speech_models.save_checkpoint(tmp_path / "model")
    speech_models.dac().save_pretrained(folder / "late")
    fast, own = (mmspec.accelerate(folder, "plain", **one) for one in ({"codec": "late"}, {}))
    late, wanted = synthesize(fast), synthesize(own)
    assert codes(late) == codes(wanted)
    assert late.sampling_rate == Codec.of(speech_models.dac()).sampling_rate
    assert torch.equal(late.waveform, Codec.of(speech_models.dac()).decode(late.codes[0]))
    assert late.stats.first_audio_round > wanted.stats.first_audio_round


def test_speech_of_no_frame_is_a_file_all_the_same(tmp_path: Path) -> None:
    """A model may end at once."""
    fast = speech_models.accelerated_speaker()
    out = fast.synthesize("red", seed=3, prefix_allowed_tokens_fn=lambda row, ids: [11])
    assert out.codes[0].shape == (1, 0)
    assert out.stats.jitter_ms is None
    (file,) = out.save(tmp_path / "nothing.wav")
    with wave.open(str(file)) as read:
        assert read.getnframes() == 0


def test_accelerated_speech_can_be_saved(tmp_path: Path) -> None:
    fast = speech_models.accelerated_speaker("coupled")
    fast.save_pretrained(tmp_path)
    parts = {"codec": speech_models.codec(), "processor": speech_models.words()}
    again = mmspec.load(tmp_path, speech_models.speaker(), **parts)
    assert codes(synthesize(again)) == codes(synthesize(fast))


def test_the_default_with_a_draft_model_drafts_one_code() -> None:
    """The fastest measured; a named recipe, a length and a tree are the user's."""

    def draft(*recipe: str, **given: Any) -> str:
        parts = {"codec": speech_models.codec(), "processor": speech_models.words(), **given}
        small = speech_models.speaker(seed=1, layers=1)
        fast = mmspec.accelerate(speech_models.speaker(), *recipe, drafter=small, **parts)
        return str(fast.recipe.execution.description)

    assert draft() == draft(length=None) == "chain of 1"
    assert draft(length=3) == "chain of 3"
    assert draft("coupled") == "chain of 5"
    assert "tree" in draft(tree=[2, 1])
    said = ModelOptions(command="bench", modality="tts")
    assert select(said).own_options == {"coupled": {"length": 1}}
    assert not select(replace(said, length="2")).own_options
    assert not select(replace(said, recipe=["coupled"])).own_options


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty text": ({"text": " "}, "has no words"),
    "unknown word": ({"text": "red zebra"}, "does not know 'zebra'"),
    "no text": ({"text": 3}, "neither a text"),
    "nothing": ({"text": None}, "give synthesize"),
    "too long": ({"text": "red " * 70}, "has 64 positions"),
    "too many codes": ({"text": "red", "max_new_tokens": 70}, "do not fit"),
    "unknown voice": ({"text": "red", "voice": "eve"}, "choose one of anna, ben"),
    "no voice": ({"text": "red", "voice": 3}, "voice=3 is not known"),
    "voices": ({"text": "red", "voice": VOICES}, "1 texts have 2 voices"),
    "both lengths": ({"text": "red", "seconds": 1, "max_new_tokens": 4}, "give one"),
    "no time": ({"text": "red", "seconds": 0}, "seconds=0 must be above 0"),
    "eos": ({"text": "red", "eos_token_id": 3}, "eos_token_id cannot be given"),
    "a mask of no ids": ({"text": "red", "attention_mask": torch.ones(1, 3)}, "with input_ids"),
    "a dictionary": ({"text": "red", "output_scores": True}, "it returns waveforms"),
    "greedy and aware": ({"text": "red", "repetition_aware": True, "temperature": 0}, "resamples"),
    "no flag": ({"text": "red", "do_sample": "yes"}, "do_sample='yes' is neither True nor False"),
    "a tensor as a count": (
        {"text": "red", "top_k": torch.ones(2)},
        "top_k=.* number",
    ),
    "no ids": ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, r"int64 \(1, 0\) must all end"),
    "no begin": ({"input_ids": torch.tensor([[2, 3]])}, "end with id 10"),
    "unknown": ({"text": "red", "speed": 2}, "speed is not a generation setting"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_refused(case: str) -> None:
    request, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        speech_models.accelerated_speaker().synthesize(**request)


def test_a_codec_of_other_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="the codec has 4 codebooks, and the language model"):
        speech_models.accelerated_speaker(codec=speech_models.codec(books=4))
    with pytest.raises(ValueError, match="the codec has 16 codes"):
        speech_models.accelerated_speaker(codec=speech_models.codec(size=16))
    with pytest.raises(ValueError, match="is not a codec"):
        speech_models.accelerated_speaker(codec=speech_models.speaker())
    with pytest.raises(ValueError, match="no codec in its folder"):
        mmspec.accelerate(speech_models.speaker(), "plain")
    with pytest.raises(ValueError, match="do not fit into 20 ids"):
        speech_models.accelerated_speaker(codes={"first": 15, "count": 8, "begin": 1, "end": 2})


def test_broken_logits_lose_nothing() -> None:
    model = deepcopy(speech_models.speaker())
    parts = {"codec": speech_models.codec(), "processor": speech_models.words()}
    fast = mmspec.accelerate(model, "plain", **parts)
    before = synthesize(fast)
    weight = model.model.norm.weight

    def damage(kept: Round) -> None:
        if kept.index == 2:
            weight.data.fill_(torch.nan)

    with pytest.raises(BrokenLogits) as error:
        synthesize(fast, on_round=damage)
    wanted = [[one + speech_models.LAYOUT.first for one in row[0][:3]] for row in codes(before)]
    assert error.value.tokens == wanted


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    out = synthesize(speech_models.accelerated_speaker())
    with pytest.raises(ValueError, match="cannot be written"):
        out.save(tmp_path / "nowhere" / "a.wav")
    with pytest.raises(ValueError, match="name a file that ends in"):
        out.save(tmp_path / "a.mp3")
    with pytest.raises(ValueError, match="path=None must be a path"):
        out.save(None)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["nothing-here", "a/b/c", "./codec-x", "/no/codec", "zoo:codec"])
def test_an_unknown_codec_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hub is asked for what cannot be a hub name."""
    speech_models.save_checkpoint(tmp_path)
    monkeypatch.setattr("mmspec.modalities.speech.synthesis.plug.load_codec", None)
    message = r"is no folder, and none of those beside the model's weights \(codec\); .* owner/name"
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(str(tmp_path), "plain", codec=name)


def test_folders_of_the_working_directory_are_not_listed_as_codecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was not loaded from a folder has no codecs beside its weights."""
    speech_models.save_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"beside the model's weights; give one"):
        speech_models.accelerated_speaker(codec="nothing-here")
