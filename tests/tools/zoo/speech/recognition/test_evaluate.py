"""The recognisers of the zoo hear: recordings of the package, by transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.modalities.speech.recordings import recordings
from tools.zoo.speech.recognition import granite, whisper
from tools.zoo.speech.recognition.evaluate import acceptance, word_errors

SAID = [one.text for one in recordings()]
TARGETS = {"whisper": whisper.transcribe}


@pytest.fixture(scope="module")
def sounds() -> list[torch.Tensor]:
    return [one.waveform() for one in recordings()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TARGETS)
def test_held_out_recordings_are_understood(name: str, sounds: list[torch.Tensor]) -> None:
    model, reader = zoo.load(name), zoo.processor(name)
    assert word_errors(SAID, TARGETS[name](model, reader, sounds)).rate <= 0.05
    shuffled = [sounds[-1], *sounds[:-1]]  # whoever does not listen cannot know
    assert word_errors(SAID[:4], TARGETS[name](model, reader, shuffled[:4])).rate > 0.3


@pytest.mark.exhaustive
def test_granite_hears_and_its_ctc_head_does(sounds: list[torch.Tensor]) -> None:
    model, reader = zoo.load("granite-speech"), zoo.processor("granite-speech")
    spelt = word_errors(SAID, granite.transcribe_by_ctc(model, reader, sounds)).rate
    written = word_errors(SAID, granite.transcribe(model, reader, sounds)).rate
    assert spelt <= 0.05
    assert written <= 0.05
    assert model.config.text_config.logits_scaling != 1


def test_whisper_says_when_and_goes_on_where_a_window_ends(sounds: list[torch.Tensor]) -> None:
    model, reader = zoo.load("whisper"), zoo.processor("whisper")
    [first, second] = sounds[0], sounds[5]
    both = torch.cat([first, second])
    made = reader.feature_extractor(
        both.numpy(), sampling_rate=16_000, truncation=False, padding="longest",
        return_attention_mask=True, return_tensors="pt",
    )  # fmt: skip
    assert made.input_features.shape[-1] > 100 * whisper.CHUNK_S
    out = model.generate(**made, return_timestamps=True, return_segments=True, language="en")
    [segments] = out["segments"]
    heard = " ".join(reader.decode(one["tokens"], skip_special_tokens=True) for one in segments)
    assert word_errors([f"{SAID[0]} {SAID[5]}"], [" ".join(heard.split())]).rate <= 0.2
    ends = [float(one["end"]) for one in segments]
    assert ends == sorted(ends)
    assert any(abs(end - len(first) / 16_000) < 0.5 for end in ends)


@pytest.mark.exhaustive
def test_the_drafter_follows_and_changes_nothing(sounds: list[torch.Tensor]) -> None:
    target, drafter = zoo.load("whisper"), zoo.load("whisper-drafter")
    reader = zoo.processor("whisper")
    asked = [whisper.prepare_inputs(reader, [sound]) for sound in sounds[:4]]
    assert acceptance(target, "whisper-assisted", drafter, asked, 5) > 3
    fast = mmspec.accelerate(target, "whisper-assisted", drafter=drafter)
    for one in asked:
        plain = target.generate(**one, do_sample=False)
        assert torch.equal(fast.generate(**one, do_sample=False).sequences, plain)


@pytest.mark.slow
@pytest.mark.skipif(which("espeak-ng") is None, reason="espeak-ng is not here")
@pytest.mark.parametrize("name", ["whisper", "whisper-drafter", "granite-speech"])
def test_training_writes_a_checkpoint_that_loads(name: str, tmp_path: Path) -> None:
    stages: list[Any] = []
    report = zoo.train(name, tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    assert report["parameters"] > 10_000
    assert "write" in stages
    assert f"zoo train {name}" in (tmp_path / "README.md").read_text()
