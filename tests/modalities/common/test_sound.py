"""Sounds: what is read back is what was written, and what is none is refused."""

from __future__ import annotations

import math
import sys
import wave
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.modalities.common import resampling
from mmspec.modalities.common.resampling import resample
from mmspec.modalities.common.sound import Sound, read, sound, write

TONE = torch.sin(torch.arange(800) * 2 * math.pi * 440 / 8000) * 0.5


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = read(write(tmp_path / "tone.wav", TONE, 8000))
    assert (found.rate_hz, found.seconds) == (8000, 0.1)
    torch.testing.assert_close(found.samples, TONE, atol=1 / 32000, rtol=0)


def test_bytes_are_read_as_their_file_and_no_longer_than_allowed(tmp_path: Path) -> None:
    file = write(tmp_path / "tone.wav", TONE, 8000)
    found = read(BytesIO(file.read_bytes()), "the audio", max_seconds=0.1)
    assert torch.equal(found.samples, read(file).samples)
    with pytest.raises(ValueError, match=r"the audio: it is longer than 0.05 s"):
        read(BytesIO(file.read_bytes()), "the audio", max_seconds=0.05)
    with pytest.raises(ValueError, match="the audio: "):
        read(BytesIO(b"GIF89a"), "the audio")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_of_every_width(width: int, tmp_path: Path) -> None:
    full = 1 << (8 * width - 1)
    whole = (TONE.double() * full).round().long().numpy()
    if width == 1:
        held = (whole + 128).astype("u1").tobytes()
    else:
        held = b"".join(int(one).to_bytes(width, "little", signed=True) for one in whole)
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, width, 8000, 0, "NONE", ""))
        file.writeframes(held)
    torch.testing.assert_close(read(tmp_path / "tone.wav").samples, TONE, atol=1.01 / full, rtol=0)


def test_other_files_are_read_by_soundfile(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    for name, more in (("tone.flac", {}), ("float.wav", {"subtype": "FLOAT"})):
        soundfile.write(tmp_path / name, TONE.numpy(), 8000, **more)
        torch.testing.assert_close(read(tmp_path / name).samples, TONE, atol=1e-4, rtol=0)


def test_the_error_without_soundfile_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tone.mp3").write_bytes(b"none")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=r"tone.mp3: .*soundfile.*mmspec\[speech\]"):
        read(tmp_path / "tone.mp3")


def test_channels_are_averaged_and_rates_changed() -> None:
    both = sound(torch.stack((TONE, TONE * 0)), 8000)
    torch.testing.assert_close(both.samples, TONE / 2)
    again = Sound(TONE, 8000).at(16000).at(8000)
    torch.testing.assert_close(again.samples[50:-50], TONE[50:-50], atol=2e-2, rtol=0)
    assert Sound(TONE, 8000).at(16000).seconds == pytest.approx(0.1)
    assert sound([0.25], 8000).samples.tolist() == [0.25]  # one sample is a sound
    ints = (TONE * 32768).to(torch.int16)
    torch.testing.assert_close(sound(ints, 8000).samples, TONE, atol=1e-4, rtol=0)
    assert sound(torch.tensor([0, 128, 255], dtype=torch.uint8), 8000).samples[1] == 0


@pytest.mark.parametrize("rates", [(44100, 16000), (8000, 16000), (22050, 16000), (16000, 24000)])
def test_resampling_is_that_of_torchaudio(rates: tuple[int, int]) -> None:
    functional = pytest.importorskip("torchaudio.functional")
    samples = torch.rand(rates[0] + 17, generator=torch.Generator().manual_seed(0)) * 2 - 1
    torch.testing.assert_close(
        resample(samples, *rates), functional.resample(samples, *rates), atol=1e-4, rtol=0
    )
    assert torch.equal(resample(samples, *rates), Sound(samples, rates[0]).at(rates[1]).samples)


LARGEST = pytest.param(383_999, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("rate", [44_101, 16_001, LARGEST, 1_001])
def test_any_rate_is_resampled_in_bounded_memory(
    rate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of any size give the same samples; the filter has a bounded size."""

    def tone(hz: int) -> torch.Tensor:
        return torch.sin(torch.arange(2 * hz, dtype=torch.float64) * 2 * math.pi * 100 / hz).float()

    found = resample(tone(rate), rate, 16000)
    torch.testing.assert_close(found[200:-200], tone(16000)[200:-200], atol=1e-2, rtol=0)
    largest = resampling._make_filter(rate, 16000, math.ceil(6 * max(rate / 16000, 1) / 0.99))
    assert largest.numel() < 16 * (16000 + rate)
    monkeypatch.setattr(resampling, "BLOCK", 1)
    torch.testing.assert_close(resample(tone(rate), rate, 16000), found)


def test_a_long_file_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.stack((TONE, -TONE / 2))
    whole = read(write(tmp_path / "tone.wav", both, 8000))
    monkeypatch.setattr("mmspec.modalities.common.sound.BLOCK", 6)
    assert torch.equal(read(tmp_path / "tone.wav").samples, whole.samples)
    pytest.importorskip("soundfile").write(tmp_path / "tone.flac", both.T.numpy(), 8000)
    torch.testing.assert_close(
        read(tmp_path / "tone.flac").samples, whole.samples, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("rate", [1, 999, 384_001, 2**31 - 1])
def test_rates_of_no_recording_are_refused(rate: int, tmp_path: Path) -> None:
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(800))
    with pytest.raises(ValueError, match=rf"tone.wav: .* {rate} Hz must be 1000 to 384000; conv"):
        read(tmp_path / "tone.wav")
    with pytest.raises(ValueError, match=f"sampling_rate={rate} must be"):
        sound(TONE, rate)


BAD: dict[str, tuple[Any, int | None, str]] = {
    "no rate": (TONE, None, "sampling_rate=, such as 16000"),
    "rate of nothing": (TONE, 0, "sampling_rate=0"),
    "empty": (torch.zeros(0), 8000, "the audio is empty"),
    "no number": (torch.tensor([0.0, math.nan]), 8000, "1 samples are not finite"),
    "too loud": (TONE * 32768, 8000, "samples reach 16384.*-1, 1"),
    "whole numbers in a list": ([0, 8000, -8000], 8000, "int64.*such as int16"),
    "whole numbers of 64 bits": ((TONE * 32768).long(), 8000, "int64.*such as int16"),
    "transposed": (torch.zeros(800, 2), 8000, r"\(800, 2\).*transpose"),
    "complex": (torch.zeros(3, dtype=torch.complex64), 8000, "complex64 are not audio"),
    "no samples": (object(), 8000, "is neither a file nor samples"),
    "nothing": (None, None, "audio=None is neither a file nor samples"),
    "two rates": ({"array": TONE, "sampling_rate": 8000}, 16000, "the mapping has .* of 8000"),
    "another rate": (Sound(TONE, 8000), 16000, "the audio has .* of 8000"),
    "no file": ("nowhere.wav", None, "there is no audio file nowhere.wav"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_sound_is_one_error(case: str) -> None:
    source, rate_hz, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        sound(source, rate_hz)


def test_a_file_has_its_own_rate(tmp_path: Path) -> None:
    place = write(tmp_path / "tone.wav", TONE, 8000)
    with pytest.raises(ValueError, match=r"sampling_rate=16000.*8000.*drop"):
        sound(place, 16000)
    (tmp_path / "cut.wav").write_bytes(place.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"cut\.wav: cannot be read as audio"):
        read(tmp_path / "cut.wav")


def test_what_is_no_sound_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.wav"):
        write(tmp_path / "tone.mp3", TONE, 8000)
    with pytest.raises(ValueError, match="not finite"):
        write(tmp_path / "tone.wav", TONE / 0, 8000)
    loud = read(write(tmp_path / "loud.wav", np_ones() * 3, 8000))
    assert float(loud.samples.max()) == pytest.approx(1, abs=1e-4)


def np_ones() -> torch.Tensor:
    return torch.from_numpy(np.ones(4, "float32"))
