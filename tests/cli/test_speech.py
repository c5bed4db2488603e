"""The command line speaks: a sound, a picture of it, and what the run reports."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest
from PIL import Image
from transformers import EncodecFeatureExtractor

from mmspec.modalities.speech.frames import tiny_models as frames
from tests.cli.running import fail, run
from tests.toys import speech_models

SHORT = ("--max-new-tokens", "16", "--voice", "ben", "--seed", "9")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(speech_models.save_checkpoint(tmp_path_factory.mktemp("speaker")))


def test_a_sound_and_its_picture_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    out, shown = tmp_path / "said.wav", tmp_path / "said.png"
    asked = ("generate", "--model", model, "--prompt", "a red circle", "--repeats", "1", *SHORT)
    found = run(capsys, *asked, "--modality", "tts", "--out", str(out), "--rounds", str(shown))
    assert found["calls"] == found["stats"]["target_calls"]
    assert (found["recipe"], found["exact"]) == ("prompt-lookup", True)
    assert found["identical_to_plain"]
    assert found["files"] == [str(out), str(shown)]
    with wave.open(str(out)) as file:
        assert file.getnframes() / file.getframerate() == found["seconds"][0] > 0
    assert Image.open(shown).size[0] > 1000
    assert found["stats"]["first_audio_ms"] > 0
    assert found["stats"]["first_audio_round"] > 0
    assert "real-time factor" in found["extras"]


def test_what_cannot_be_spoken_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    asked = ("generate", "--model", model, "--no-compare")
    for more, message in (
        (("--prompt", " "), "the prompt is empty"),
        (("--prompt", "red", "--voice", "eve"), "choose one of anna, ben"),
        (("--prompt", "red", "--max-new-tokens", "70"), "codes do not fit"),
        (("--prompt", "red", "--out", str(tmp_path / "a.mp3")), "choose one of .wav"),
        (("--prompt", "red", "--out", str(tmp_path / "no" / "a.wav")), "there is no folder"),
        (("--prompt", "red", "--image", "zoo:scene"), "--image: no option"),
    ):
        assert message in fail(capsys, *asked, *more)[1]


def test_doctor_looks_at_the_codec(capsys: pytest.CaptureFixture[str], model: str) -> None:
    found = {one["check"]: one for one in run(capsys, "doctor", model)["findings"]}
    assert found["codec"]["target"] == "EncodecModel"
    assert found["codes of speech, of the codec"]["target"] == speech_models.SIZE
    assert "prompt-lookup" in found["recipes that fit without a draft model"]["target"]


@pytest.mark.exhaustive
def test_recipes_are_certified_for_speech(capsys: pytest.CaptureFixture[str]) -> None:
    how = ("--modality", "tts", "--samples", "600", "--seeds", "2")
    found = run(capsys, "certify", "prompt-lookup", *how)
    assert found["verdict"] == "exact"
    assert {one["outcome"] for one in found["checks"]} <= {"passed", "skipped"}


def test_models_of_several_codebooks_play(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "musicgen"
    frames.musicgen().save_pretrained(folder)
    EncodecFeatureExtractor(sampling_rate=1000).save_pretrained(folder)
    speech_models.words().save_pretrained(folder)
    shown = {one["check"]: one["target"] for one in run(capsys, "doctor", str(folder))["findings"]}
    assert (shown["frames"], shown["codebooks"]) == ("delay pattern", frames.BOOKS)
    assert "frame-lookup" in shown["recipes that fit without a draft model"]
    out = tmp_path / "played.wav"
    asked = ("generate", "--model", str(folder), "--prompt", "a red circle", "--out", str(out))
    found = run(capsys, *asked, "--seconds", "0.1", "--repeats", "1", "--guidance", "3")
    assert (found["recipe"], found["identical_to_plain"]) == ("frame-lookup", True)
    assert found["settings"] == {"seconds": 0.1, "guidance": 3.0}
    assert len(found["codes"][0]) == frames.BOOKS
    assert out.stat().st_size > 44
