"""`transcribe` writes what Whisper's own `generate()` writes, whatever it hears."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmspec
from mmspec.draft import Round
from mmspec.modalities.common.sound import write
from mmspec.modalities.speech.recognition.whisper_generate import EncoderCache
from tests.covering import exhaustive, limited
from tests.modalities.speech.recognisers import RATE_HZ, noise, processor, tokenizer, whisper

LONG = (0.3, 1.5, 5.0)  # seconds; a window has 2
CLIPS = [noise(seconds, seed) for seed, seconds in enumerate(LONG)]
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "timestamps": {"timestamps": True},
    "language": {"language": "en"},
    "language and task": {"language": "de", "task": "translate"},
    "forced tokens": {"forced_decoder_ids": [(1, 29), (2, 31)]},
    "prompt": {"prompt_ids": torch.tensor([32, 3, 4])},
    "conditioned": {"condition_on_prev_tokens": True, "timestamps": True},
    "length": {"max_new_tokens": 5},
}


@cache
def model() -> Any:
    return whisper()


@cache
def fast(recipe: str = "prompt-lookup", **parts: Any) -> mmspec.Accelerated:
    drafter = whisper(seed=1, layers=1) if mmspec.recipes.get(recipe).takes_drafter else None
    return mmspec.accelerate(model(), recipe, drafter=drafter, processor=processor(), **parts)


def own(clip: Tensor, **how: Any) -> list[int]:
    """What the library writes of one clip."""
    long = clip.shape[0] > 2 * RATE_HZ
    more = {"truncation": False, "padding": "longest"} if long else {}
    heard = processor()(clip.numpy(), sampling_rate=RATE_HZ, return_tensors="pt", **more)
    forced = how.pop("forced_decoder_ids", None)
    if how.pop("timestamps", False) or long:
        how["return_timestamps"] = True
    if forced is not None:
        how["generation_config"] = copy.deepcopy(model().generation_config)
        how["generation_config"].forced_decoder_ids = [list(pair) for pair in forced]
    out = model().generate(heard.input_features, return_segments=True, **how)
    return [token for one in out["segments"][0] for token in one["tokens"].tolist()]


@pytest.mark.parametrize(
    "recipe", ["prompt-lookup", pytest.param("coupled", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("way", exhaustive(WAYS, {"as it comes", "language and task", "length"}))
def test_clips_of_any_length_are_what_the_library_writes(way: str, recipe: str) -> None:
    found = fast(recipe).transcribe(CLIPS, sampling_rate=RATE_HZ, **WAYS[way])
    expected = [own(clip, **WAYS[way]) for clip in CLIPS]
    assert [one.tokens for one in found.transcripts] == expected
    words = [tokenizer().decode([t for t in row if t <= 34], True) for row in expected]
    assert found.texts == [text.strip() for text in words]
    assert found.stats.fallback is None
    assert len(set(map(tuple, expected))) > 1  # not the same whatever is heard


@pytest.mark.parametrize("drawn", limited([{}, {"temperature": 1.0, "seed": 5}], 1))
def test_every_sound_may_have_its_language(drawn: dict[str, Any]) -> None:
    languages = ["en", "de", "de"]
    how = {"sampling_rate": RATE_HZ, "max_new_tokens": 8, **drawn}
    found = fast().transcribe(CLIPS, language=languages, **how).texts
    rows = [{"row_ids": [at]} if drawn else {} for at in range(len(CLIPS))]
    alone = [
        fast().transcribe(clip, language=one, **row, **how).text
        for clip, one, row in zip(CLIPS, languages, rows, strict=True)
    ]
    assert found == alone
    assert found[0] != fast().transcribe(CLIPS[0], language="de", **rows[0], **how).text


def test_pieces_say_when_they_were_spoken() -> None:
    timed = fast().transcribe(CLIPS[2], sampling_rate=RATE_HZ).transcripts[0]
    assert timed.pieces[-1].end_seconds == pytest.approx(5, abs=1)
    assert "".join(one.text for one in timed.pieces) == timed.text
    assert not fast().transcribe(CLIPS[0], sampling_rate=RATE_HZ).transcripts[0].pieces


def test_a_sampled_voice_is_its_own_whatever_it_comes_with() -> None:
    drawn = {"temperature": 1.0, "seed": 5, "sampling_rate": RATE_HZ, "max_new_tokens": 8}
    every = fast("coupled").transcribe(CLIPS, **drawn)
    plain = fast("plain").transcribe(CLIPS, **drawn)
    assert [one.tokens for one in every.transcripts] == [one.tokens for one in plain.transcripts]
    alone = fast("coupled").transcribe([CLIPS[1]], row_ids=[1], **drawn)
    assert alone.transcripts[0] == every.transcripts[1]
    other = fast("plain").transcribe(CLIPS[1], **{**drawn, "seed": 6})
    assert other.text != every.texts[1]


@pytest.mark.exhaustive
def test_temperatures_are_fallen_back_to() -> None:
    how = {
        "temperature": (0.0, 0.8),
        "max_new_tokens": 8,
        "compression_ratio_threshold": 1.2,
        "logprob_threshold": -1.0,
        "no_speech_threshold": 0.99,
        "sampling_rate": RATE_HZ,
        "seed": 3,
    }
    found, plain = (fast(name).transcribe(CLIPS[:2], **how) for name in ("coupled", "plain"))
    assert found.texts == plain.texts
    greedy = fast("plain").transcribe(CLIPS[:2], **{**how, "temperature": 0.0})
    assert greedy.texts != plain.texts  # it did fall back
    assert plain.stats.num_new_tokens > greedy.stats.num_new_tokens


@contextmanager
def encoded() -> Iterator[list[int]]:
    """Rows of every pass of the encoder."""
    rows: list[int] = []
    layer = model().get_encoder().conv1
    handle = layer.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    try:
        yield rows
    finally:
        handle.remove()


def test_the_encoder_runs_once_per_window() -> None:
    """Though the language is detected first, and tokens are written at two temperatures."""
    with encoded() as rows:
        fast().transcribe(CLIPS[:1], sampling_rate=RATE_HZ, max_new_tokens=1)
    assert rows == [1]
    with encoded() as rows:
        how = {"temperature": (0.0, 0.5), "logprob_threshold": 0.0}  # falls back for sure
        found = fast().transcribe(CLIPS[:1], sampling_rate=RATE_HZ, max_new_tokens=1, **how)
    assert (rows, found.stats.num_new_tokens) == ([1], 2)
    assert "forward" not in vars(model().get_encoder())


def test_states_of_windows_that_are_over_are_forgotten() -> None:
    once = EncoderCache(model().get_encoder())
    for seed in range(3):
        once(torch.randn(2, 16, 200, generator=torch.Generator().manual_seed(seed)))
        assert len(once.states) == 2


def test_a_stream_is_broken_off_and_begun_again() -> None:
    asked = {"audio": CLIPS, "sampling_rate": RATE_HZ, "call": "transcribe"}
    expected = fast().transcribe(CLIPS, sampling_rate=RATE_HZ)
    broken = fast().stream(**asked)
    next(broken), next(broken)
    rounds: list[int] = []

    def read() -> Iterator[Round]:
        found = yield from fast().stream(**asked, on_round=lambda one: rounds.append(one.index))
        assert found.transcripts == expected.transcripts

    for at, _ in enumerate(read()):
        if at == 2:
            broken.close()
    assert len(rounds) >= expected.stats.target_calls
    assert "forward" not in vars(model().get_encoder())


def test_a_file_stereo_and_another_rate(tmp_path: Path) -> None:
    clip = noise(1.0, rate_hz=8000)
    place = write(tmp_path / "both.wav", torch.stack((clip, clip)), 8000)
    one = fast().transcribe(place)
    two = fast().transcribe(torch.stack((clip, clip)), sampling_rate=8000)
    three = fast().transcribe([{"array": clip.numpy(), "sampling_rate": 8000}])
    assert two.text == three.text
    assert len(one.text) > 0
    with pytest.raises(ValueError, match=r"2 transcripts; read \.texts"):
        _ = fast().transcribe([place, place]).text


QUIET = {"silence": torch.zeros(RATE_HZ), "one sample": torch.tensor([0.1])}


@pytest.mark.parametrize("case", QUIET)
def test_silence_and_next_to_nothing_are_heard_too(case: str) -> None:
    found = fast().transcribe(QUIET[case], sampling_rate=RATE_HZ)
    assert found.transcripts[0].tokens == own(QUIET[case])


@pytest.mark.slow
def test_a_very_long_sound() -> None:
    found = fast().transcribe(noise(90.0), sampling_rate=RATE_HZ)
    assert found.transcripts[0].tokens == own(noise(90.0))
    assert found.transcripts[0].pieces[-1].end_seconds > 85


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": (torch.zeros(0), {}, "the audio is empty"),
    "no sounds": ([], {}, "list of recordings is empty"),
    "NaN": (torch.tensor([math.nan]), {}, "not finite"),
    "no such language": (CLIPS[0], {"language": "klingon"}, "klingon"),
    "language of others": (CLIPS[0], {"language": "fr"}, r"fr.*lang_to_id"),
    "no such task": (CLIPS[0], {"task": "sing"}, "sing"),
    "two beginnings": (
        CLIPS[0],
        {"language": "en", "forced_decoder_ids": [(1, 29)]},
        "forced_decoder_ids and language both",
    ),
    "no beginning": (
        CLIPS[0],
        {"forced_decoder_ids": "de"},
        r"'de' are not pairs \(position, id\)",
    ),
    "an id of nothing": (CLIPS[0], {"forced_decoder_ids": [(1, 9999)]}, "9999.*ids below"),
    "words for nobody": (CLIPS[0], {"prompt": "please"}, "prompt='please'.*prompt_ids"),
    "timed words": (CLIPS[0], {"return_token_timestamps": True}, "return_token_timestamps=True"),
    "beams in a tensor": (CLIPS[0], {"num_beams": torch.zeros(0)}, "num_beams=.*beam search"),
    "configuration": (CLIPS[0], {"generation_config": torch.zeros(0)}, "give a GenerationConfig"),
    "beams": (CLIPS[0], {"num_beams": 2}, "num_beams=2.*beam search"),
    "row ids": (CLIPS[0], {"row_ids": [1, 2]}, "must be one per recording"),
    "languages": (CLIPS[:2], {"language": ["en"]}, "2 recordings have 1 languages"),
    "another sound": (
        CLIPS[0],
        {"input_features": torch.zeros(1, 16, 200)},
        "computed from the recordings",
    ),
    "times by another name": (CLIPS[0], {"return_timestamps": True}, "give timestamps=True"),
    "a dictionary": (CLIPS[0], {"return_dict_in_generate": True}, "returns transcripts"),
    "unknown": (CLIPS[0], {"volume": 11}, "volume"),
    "nothing": (None, {}, "audio=None is neither a file nor samples"),
    "sparse": (torch.zeros(9).to_sparse(), {}, "float32.*holds no samples; give a dense tensor"),
    "NaN threshold": (CLIPS[0], {"no_speech_threshold": math.nan}, "no_speech_threshold=nan must"),
    "one of two thresholds": (CLIPS[0], {"no_speech_threshold": 0.6}, "give both, such as 0.6 and"),
    "a threshold of letters": (CLIPS[0], {"logprob_threshold": "a"}, "logprob_threshold='a' must"),
    "no temperature": (CLIPS[0], {"temperature": ()}, r"temperature=\(\) is empty; give 0.0"),
    "a NaN to fall back to": (CLIPS[0], {"temperature": (0.0, math.nan)}, "temperature=nan must"),
    "cold": (CLIPS[0], {"temperature": -1}, "temperature=-1 must be a number of at least 0"),
    "a language of numbers": (CLIPS[0], {"language": 3}, "language=3 must be a string, such as"),
    "no flag": (CLIPS[0], {"condition_on_prev_tokens": "no"}, "'no' is neither True nor False"),
    "a bool for a length": (CLIPS[0], {"max_new_tokens": True}, "max_new_tokens=True"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_error(case: str) -> None:
    audio, how, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        fast().transcribe(audio, sampling_rate=RATE_HZ, **how)


def test_without_marks_of_time_long_sounds_are_refused() -> None:
    untimed = whisper()
    del untimed.generation_config.no_timestamps_token_id
    own_fast = mmspec.accelerate(untimed, processor=processor())
    assert own_fast.transcribe(CLIPS[0], sampling_rate=RATE_HZ).text
    with pytest.raises(ValueError, match=r"5\.0 s needs timestamp tokens.*at most 2 s"):
        own_fast.transcribe(CLIPS[2], sampling_rate=RATE_HZ)
    with pytest.raises(ValueError, match=r"processor is unknown.*processor=\.\.\."):
        mmspec.accelerate(untimed).transcribe(CLIPS[0], sampling_rate=RATE_HZ)


def test_a_processor_that_reads_no_words_is_refused_before_it_listens() -> None:
    half = mmspec.accelerate(model(), processor=processor().feature_extractor)
    with pytest.raises(ValueError, match=r"WhisperFeatureExtractor.*no tokenizer"):
        half.transcribe(CLIPS[0], sampling_rate=RATE_HZ)


def test_words_that_were_added_behind_the_marks_of_time_are_written() -> None:
    grown, reader = whisper(), copy.deepcopy(processor())
    reader.tokenizer.add_tokens(["kubernetes"])
    grown.resize_token_embeddings(len(reader.tokenizer))
    only = [transformers.SuppressTokensLogitsProcessor(range(len(tokenizer())))]
    how = {"sampling_rate": RATE_HZ, "max_new_tokens": 2, "logits_processor": only}
    found = mmspec.accelerate(grown, processor=reader).transcribe(CLIPS[0], **how)
    assert found.text == "kubernetes" * 2


def test_features_may_come_by_place_as_they_do_in_the_library() -> None:
    heard = processor()(CLIPS[0].numpy(), sampling_rate=RATE_HZ, return_tensors="pt")
    found = fast().generate(heard.input_features, language="de")
    assert torch.equal(found.sequences, model().generate(heard.input_features, language="de"))
    with pytest.raises(ValueError, match="input_features by position, once"):
        fast().generate(heard.input_features, **heard)


def test_forced_tokens_come_before_the_language_of_a_checkpoint() -> None:
    told, free = whisper(), whisper()
    told.generation_config.update(language="<|en|>", task="transcribe")
    found = [
        mmspec.accelerate(one, processor=processor())
        .transcribe(CLIPS[1], sampling_rate=RATE_HZ, forced_decoder_ids=[(1, 29), (2, 31)])
        .text
        for one in (told, free)
    ]
    plain = mmspec.accelerate(told, processor=processor())
    assert found[0] == found[1] != plain.transcribe(CLIPS[1], sampling_rate=RATE_HZ).text


def test_inside_a_pipeline_of_transformers() -> None:
    pipe = transformers.pipeline(
        "automatic-speech-recognition",
        model=model(),
        tokenizer=tokenizer(),
        feature_extractor=processor().feature_extractor,
    )
    for clip, more in ((CLIPS[1], {}), (CLIPS[2], {"return_timestamps": True})):
        sound = {"raw": clip.numpy(), "sampling_rate": RATE_HZ}
        greedy = {"num_beams": 1}  # a pipeline of Whisper takes five where nothing is said
        expected = pipe(dict(sound), generate_kwargs=greedy, **more)
        hooked = {**greedy, "custom_generate": fast()}
        assert pipe(dict(sound), generate_kwargs=hooked, **more) == expected
        with pytest.raises(ValueError, match=r"num_beams=5.*pass num_beams=1"):
            pipe(dict(sound), generate_kwargs={"custom_generate": fast()}, **more)
    stats = fast().last_stats
    assert stats is not None
    assert stats.target_calls > 0
