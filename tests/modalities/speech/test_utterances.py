"""The spoken Scene world: what is said, that held-out sentences are, and what comes bundled."""

from __future__ import annotations

from pathlib import Path
from shutil import which

import pytest
import torch

from mmspec.modalities.speech import utterances as speaking
from mmspec.modalities.speech.recordings import RECORDINGS, recordings, write_recordings
from mmspec.modalities.speech.sentences import MAX_CHARACTERS, sentence, split_of
from mmspec.modalities.speech.utterances import (
    RATE_HZ,
    RecordingConditions,
    Voice,
    synthesize,
    utterance,
)

needs_espeak = pytest.mark.skipif(which("espeak-ng") is None, reason="espeak-ng is not here")


def test_sentences_are_short_plain_and_on_one_side() -> None:
    train = {sentence(seed) for seed in range(200)}
    held_out = {sentence(seed, "held-out") for seed in range(100)}
    assert not train & held_out
    assert {split_of(text) for text in held_out} == {"held-out"}
    for text in train | held_out:
        assert len(text) <= MAX_CHARACTERS
        assert text.replace(" ", "").isalpha()
        assert text.islower()
    assert len(train) > 100
    with pytest.raises(ValueError, match="held-out"):
        sentence(0, "test")  # type: ignore[arg-type]


def test_recordings_are_held_out_speech() -> None:
    found = recordings()
    assert len({one.text for one in found}) == len(found) >= 12
    assert {split_of(one.text) for one in found} == {"held-out"}
    assert sum(one.path.stat().st_size for one in found) <= 1_000_000
    for one in found:
        waveform = one.waveform()
        assert RATE_HZ < len(waveform) < 4 * RATE_HZ
        assert 0.1 < float(waveform.abs().max()) <= 1
        assert len(one.text) >= 28


@needs_espeak
def test_an_utterance_is_made_by_its_seed() -> None:
    one, again, other = utterance(5), utterance(5), utterance(6)
    assert torch.equal(one.waveform, again.waveform)
    assert one.text != other.text
    assert one.text != utterance(5, "held-out").text
    assert 0 < one.start_s < one.end_s <= len(one.waveform) / RATE_HZ


@needs_espeak
def test_voice_and_room_are_heard() -> None:
    slow, fast = (synthesize("a red ring", Voice(speed_wpm=rate)) for rate in (140, 260))
    assert len(slow) > 1.3 * len(fast)
    quiet = utterance(1, voice=Voice(), room=RecordingConditions(lead_s=0.5, tail_s=0.5, peak=0.25))
    assert float(quiet.waveform.abs().max()) == pytest.approx(0.25)
    assert not quiet.waveform[: RATE_HZ // 2].any()
    noisy = utterance(
        1, voice=Voice(), room=RecordingConditions(0.5, 0.5, 0.25, snr_db=20)
    ).waveform
    noise, signal = noisy - quiet.waveform, quiet.waveform[RATE_HZ // 2 : -RATE_HZ // 2]
    ratio = 20 * torch.log10(signal.square().mean().sqrt() / noise.square().mean().sqrt())
    assert float(ratio) == pytest.approx(20, abs=0.3)


@needs_espeak
def test_recordings_can_be_made_again(tmp_path: Path) -> None:
    write_recordings(tmp_path)
    names = sorted(path.name for path in RECORDINGS.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert (tmp_path / "recordings.json").read_text() == (
        RECORDINGS / "recordings.json"
    ).read_text()
    again = [(tmp_path / one.path.name).stat().st_size for one in recordings()]
    assert again == [one.path.stat().st_size for one in recordings()]


def test_a_missing_espeak_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speaking, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="apt install espeak-ng"):
        synthesize("a red ring")


@needs_espeak
def test_an_unknown_voice_is_refused() -> None:
    with pytest.raises(RuntimeError, match="martian"):
        synthesize("a red ring", Voice("martian"))
