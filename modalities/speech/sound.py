"""Sounds: read from a file or handed over, checked, mixed down, resampled, and written.

WAV is read and written by the standard library; other files need soundfile, which comes with
`pip install mmspec[speech]`. torchaudio resamples.
"""

from __future__ import annotations

import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import check_number, described, first_line

SOUND_FILES = (".wav",)  # endings that `write` takes
MOST_CHANNELS = 16
LOUDEST = 100.0  # of floats; whole numbers that lost their type reach thousands
UNTOLD = (torch.int64, torch.uint64)  # nobody records in these: they have lost their own type
# by bytes of a sample
_WIDTHS: dict[int, Any] = {
    1: np.dtype("u1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
}


@dataclass(frozen=True)
class Sound:
    """One voice: samples (n,) float32 in -1..1, and how many of them make a second."""

    samples: Tensor
    rate_hz: int

    @property
    def seconds(self) -> float:
        return self.samples.shape[0] / self.rate_hz

    def at(self, rate_hz: int) -> Sound:
        """The same at another rate, by torchaudio's windowed sinc."""
        if rate_hz == self.rate_hz:
            return self
        from torchaudio.functional import resample

        return Sound(resample(self.samples, self.rate_hz, rate_hz), rate_hz)


def sound(source: Any, rate_hz: int | None = None) -> Sound:
    """A file, or samples (n,) or (channels, n) at `rate_hz`; several channels are averaged.

    Samples are a tensor, an array or a list; whole numbers are scaled by the range of their type.
    Raises ValueError for a file that is not there or cannot be read, for samples without a rate,
    empty ones, complex ones, ones that are not finite, floats far outside -1..1, whole numbers of
    64 bits, and a `rate_hz` that is not the file's own.
    """
    if isinstance(source, Sound):
        return source
    if isinstance(source, Mapping):  # as data sets hold them
        unknown = sorted({*source} - {"array", "sampling_rate", "path"})
        if unknown or "array" not in source:
            raise ValueError(
                f"a sound of {', '.join(map(str, source))} is not known; give array and "
                "sampling_rate, or the samples themselves"
            )
        return sound(source["array"], source.get("sampling_rate", rate_hz))
    if isinstance(source, str | Path):
        found = read(source)
        if rate_hz is not None and rate_hz != found.rate_hz:
            raise ValueError(
                f"sampling_rate={rate_hz}, but {source} has {found.rate_hz} samples a second; drop "
                "sampling_rate="
            )
        return found
    if rate_hz is None:
        raise ValueError(
            "samples do not say how many make a second; give sampling_rate=, such as 16000"
        )
    check_number("sampling_rate", rate_hz, 1000, whole=True, example=16000)
    return Sound(_mixed(_tensor(source)), rate_hz)


def read(path: str | Path) -> Sound:
    """A sound from a file. Raises ValueError for what is no sound, naming the file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no sound {path}; give a WAV file")
    try:
        samples, rate_hz = _wav(path)
    except (wave.Error, EOFError) as error:
        samples, rate_hz = _by_soundfile(path, error)
    try:
        return Sound(_mixed(samples), rate_hz)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write(path: str | Path, samples: Tensor, rate_hz: int) -> Path:
    """Samples (n,) or (channels, n) as a WAV file of 16 bits; what is beyond -1..1 is clipped.

    Raises ValueError for samples that are not finite, and for another ending than .wav.
    """
    path = Path(path)
    if path.suffix.lower() not in SOUND_FILES:
        raise ValueError(f"{path}: sounds are written as WAV; name a file that ends in .wav")
    _check_finite(samples)
    channels = torch.atleast_2d(samples.detach().cpu().float())
    whole = (channels.clamp(-1, 1) * 32767).round().to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(channels))
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(whole.T.contiguous().numpy().astype("<i2").tobytes())
    return path


def _wav(path: Path) -> tuple[Tensor, int]:
    """Samples (channels, n) and their rate. Raises wave.Error for what is none it knows."""
    with wave.open(str(path), "rb") as file:
        width, channels, rate_hz = file.getsampwidth(), file.getnchannels(), file.getframerate()
        held = file.readframes(file.getnframes())
    if width == 3:  # 24 bits are read as the upper bytes of 32
        three = np.frombuffer(held[: len(held) // 3 * 3], "u1").reshape(-1, 3)
        held, width = np.pad(three, ((0, 0), (1, 0))).tobytes(), 4
    if width not in _WIDTHS:
        raise wave.Error(f"samples of {width} bytes")
    values = np.frombuffer(
        held[: len(held) // (width * channels) * width * channels], _WIDTHS[width]
    )
    return _scaled(torch.from_numpy(values.copy())).reshape(-1, channels).T, rate_hz


def _by_soundfile(path: Path, why: Exception) -> tuple[Tensor, int]:
    """Samples (channels, n) of any file that libsndfile reads."""
    try:
        import soundfile
    except ImportError:
        raise ValueError(
            f"{path} is no WAV of whole numbers ({why}), and soundfile, which reads other sounds, "
            "is not installed: pip install mmspec[speech]"
        ) from None
    try:
        values, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    except Exception as error:  # libsndfile has its own sorts
        raise ValueError(f"{path} is no sound that can be read: {first_line(error)}") from None
    return torch.from_numpy(values).T, int(rate_hz)


def _tensor(given: Any) -> Tensor:
    try:
        samples = torch.as_tensor(given if isinstance(given, Tensor) else np.asarray(given))
    except (TypeError, ValueError):
        raise ValueError(
            f"audio={described(given)} are no samples; give a file, or a tensor (n,)"
        ) from None
    if samples.is_complex() or samples.dtype == torch.bool:
        raise ValueError(f"samples of {samples.dtype} are no sound; give floats in -1..1")
    if samples.dtype in UNTOLD:
        raise ValueError(
            f"whole numbers of {samples.dtype}, as a list of them is read, do not say how loud the "
            "loudest is; give the type they were recorded in, such as int16, or floats in -1..1"
        )
    return _scaled(samples.detach().cpu())


def _scaled(samples: Tensor) -> Tensor:
    """Floats as they are; whole numbers by the range of their type, unsigned ones around 0."""
    if samples.is_floating_point():
        return samples.float()
    limits = torch.iinfo(samples.dtype)
    middle = 0 if limits.min < 0 else (limits.max + 1) // 2
    return (samples.double() - middle).div(limits.max - middle + 1).float()


def _mixed(samples: Tensor) -> Tensor:  # (n,)
    """One channel, the average of all."""
    if samples.dim() == 2 and 0 < samples.shape[0] <= MOST_CHANNELS:
        samples = samples.mean(0)
    if samples.dim() != 1:
        raise ValueError(
            f"samples of shape {tuple(samples.shape)} are neither (n,) nor (channels, n) of at "
            f"most {MOST_CHANNELS} channels; transpose them, or give several sounds as a list"
        )
    if not samples.numel():
        raise ValueError("the sound is empty; give one sample at least")
    _check_finite(samples)
    loudest = float(samples.abs().max())
    if loudest > LOUDEST:
        raise ValueError(
            f"samples reach {loudest:g}, and floats are to be within -1..1; divide them by the "
            "range of what they were, or give whole numbers as they are"
        )
    return samples


def _check_finite(samples: Tensor) -> None:
    if not bool(samples.isfinite().all()):
        count = int((~samples.isfinite()).sum())
        raise ValueError(f"{count} samples are not finite; look where the sound was made")
