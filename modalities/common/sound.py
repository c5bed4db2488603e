"""Audio: read, check, mix down, resample and write.

WAV is read and written by the standard library; other formats need soundfile
(`pip install mmspec[speech]`). Files are read in blocks, so a long one needs no more memory than
its mono samples.
"""

from __future__ import annotations

import struct
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.errors import check_number, first_line, format_value
from mmspec.modalities.common.resampling import resample

SOUND_FILES = (".wav",)  # endings that `write` takes
MIN_RATE_HZ, MAX_RATE_HZ = 1000, 384_000
BLOCK = 1 << 20  # values of a file read at once
MAX_CHANNELS = 16
PCM_BYTES = 2  # of a sample that is written
MAX_WAV_BYTES = 0xFFFFFFFF
MAX_AMPLITUDE = 100.0  # of floats; integers converted without scaling reach thousands
UNSCALED_TYPES = (torch.int64, torch.uint64)  # of lists of integers: their original range is lost
# by bytes per sample
_WIDTHS: dict[int, Any] = {
    1: np.dtype("u1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
}


@dataclass(frozen=True)
class Sound:
    """Mono audio: samples (n,) float32 in [-1, 1], and their rate."""

    samples: Tensor
    rate_hz: int

    @property
    def seconds(self) -> float:
        return self.samples.shape[0] / self.rate_hz

    def at(self, rate_hz: int) -> Sound:
        """Resample to another rate, by a windowed sinc."""
        if rate_hz == self.rate_hz:
            return self
        return Sound(resample(self.samples, self.rate_hz, rate_hz), rate_hz)


def sound(source: Any, rate_hz: int | None = None) -> Sound:
    """Audio from a file, or from samples (n,) or (channels, n) at `rate_hz`; channels are averaged.

    Samples are a tensor, an array or a list; integers are scaled by the range of their type.
    Raises ValueError for a file that does not exist or cannot be read, for samples without a rate,
    for empty, complex or non-finite samples, floats far outside [-1, 1], 64-bit integers, and a
    `rate_hz` that differs from that of the file.
    """
    if isinstance(source, Sound):
        return _check_rate(source, rate_hz, "the audio")
    if isinstance(source, Mapping):  # as data sets hold them
        unknown = sorted({*source} - {"array", "sampling_rate", "path"}, key=str)
        if unknown or "array" not in source:
            raise ValueError(
                f"audio as a mapping of {', '.join(map(str, source))} is not supported; give array "
                "and sampling_rate, or the samples themselves"
            )
        own = source.get("sampling_rate")
        found = sound(source["array"], rate_hz if own is None else own)
        return _check_rate(found, rate_hz, "the mapping")
    if isinstance(source, str | Path):
        return _check_rate(read(source), rate_hz, source)
    samples = _to_tensor(source)
    if rate_hz is None:
        raise ValueError("samples need a sampling rate; give sampling_rate=, such as 16000")
    check_number("sampling_rate", rate_hz, MIN_RATE_HZ, MAX_RATE_HZ, whole=True, example=16000)
    return Sound(_check_samples(_mix_channels(samples)), int(rate_hz))


def _check_rate(found: Sound, rate_hz: Any, where: str | Path) -> Sound:
    """Raises ValueError for a `rate_hz` that differs from that of the sound."""
    if rate_hz is not None and rate_hz != found.rate_hz:
        raise ValueError(
            f"sampling_rate={rate_hz}, but {where} has a sampling rate of {found.rate_hz}; drop "
            "sampling_rate="
        )
    return found


def read(
    source: str | Path | BytesIO, name: str | None = None, max_seconds: float | None = None
) -> Sound:
    """Read audio from a file, or from the bytes of one.

    Raises ValueError, naming the file (or `name`), for what cannot be read, and for more than
    `max_seconds`.
    """
    if not isinstance(source, BytesIO) and not Path(source).is_file():
        raise ValueError(f"there is no audio file {source}; give a WAV file")
    file = source if isinstance(source, BytesIO) else str(source)
    try:
        with _open(file) as (rate_hz, blocks):
            if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
                raise ValueError(
                    f"its sampling rate of {rate_hz} Hz must be {MIN_RATE_HZ} to {MAX_RATE_HZ}; "
                    "convert the file, to 16000 Hz for example"
                )
            made = _read_blocks(blocks, rate_hz, max_seconds)
        return Sound(_check_samples(torch.cat(made) if made else torch.zeros(0)), rate_hz)
    except ValueError as error:
        raise ValueError(f"{name or source}: {error}") from None


def _read_blocks(blocks: Iterator[Tensor], rate_hz: int, max_seconds: float | None) -> list[Tensor]:
    """The mono samples of each block. Raises ValueError for more than `max_seconds`."""
    made, count = list[Tensor](), 0
    for block in blocks:
        made.append(_mix_channels(block))
        count += len(made[-1])
        if max_seconds is not None and count > max_seconds * rate_hz:
            raise ValueError(f"it is longer than {max_seconds:g} s; give a shorter recording")
    return made


def write(path: str | Path, samples: Tensor, rate_hz: int) -> Path:
    """Write samples (n,) or (channels, n) as 16-bit WAV, clipped to [-1, 1].

    Raises ValueError for non-finite samples, and for an ending other than .wav.
    """
    path, data = check_ending(Path(path)), encode_pcm(samples)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(torch.atleast_2d(samples)))
        file.setsampwidth(PCM_BYTES)
        file.setframerate(rate_hz)
        file.writeframes(data)
    return path


def encode_pcm(samples: Tensor) -> bytes:
    """Samples (n,) or (channels, n) as 16-bit little-endian integers, clipped to [-1, 1].

    Raises ValueError for non-finite samples.
    """
    _check_finite(samples)
    channels = torch.atleast_2d(samples.detach().cpu().float())
    whole = (channels.clamp(-1, 1) * 32767).round().to(torch.int16)
    return bytes(whole.T.contiguous().numpy().astype("<i2").tobytes())


class WavWriter:
    """A mono WAV file that grows: after every `write` its header is that of all samples so far.

    The first `write` creates it, so that a request that is refused leaves an older file as it is.
    """

    def __init__(self, path: str | Path, rate_hz: int) -> None:
        """Choose the file. Raises ValueError for an ending other than .wav."""
        self.path, self.rate_hz = check_ending(Path(path)), rate_hz
        self.file: Any = None
        self.wave: wave.Wave_write | None = None

    def write(self, samples: Tensor) -> None:  # (n,)
        """Add samples. Raises ValueError for non-finite ones."""
        data = encode_pcm(samples)
        if self.wave is None:
            self.wave = self._create()
        self.wave.writeframes(data)
        self.file.flush()

    def close(self) -> None:
        """Close the file, if it was created."""
        if self.wave is not None:
            self.wave.close()
            self.file.close()

    def _create(self) -> wave.Wave_write:
        self.file = self.path.open("wb")
        made = wave.Wave_write(self.file)
        made.setnchannels(1)
        made.setsampwidth(PCM_BYTES)
        made.setframerate(self.rate_hz)
        return made


def make_wav_header(rate_hz: int, data_bytes: int | None = None) -> bytes:
    """The header of a mono WAV file whose samples `encode_pcm` makes.

    Without their number of bytes it has the largest one, which players read to the end of the file.
    """
    riff_bytes = MAX_WAV_BYTES if data_bytes is None else data_bytes + 36
    data_bytes = MAX_WAV_BYTES if data_bytes is None else data_bytes
    form = (16, 1, 1, rate_hz, rate_hz * PCM_BYTES, PCM_BYTES, 8 * PCM_BYTES)
    head = struct.pack("<4sI4s", b"RIFF", riff_bytes, b"WAVE")
    return head + struct.pack("<4sIHHIIHH4sI", b"fmt ", *form, b"data", data_bytes)


def check_ending(path: Path) -> Path:
    """The path itself. Raises ValueError for an ending other than .wav."""
    if path.suffix.lower() not in SOUND_FILES:
        raise ValueError(f"{path}: audio is written as WAV; name a file that ends in .wav")
    return path


@contextmanager
def _open(file: str | BytesIO) -> Iterator[tuple[int, Iterator[Tensor]]]:
    """The sampling rate of a file, and blocks (channels, n) of its samples."""
    error = _find_wav_error(file)
    if isinstance(file, BytesIO):
        file.seek(0)
    if error is None:
        with wave.open(file, "rb") as opened:
            yield opened.getframerate(), _read_wav(opened)
        return
    with _open_soundfile(file, error) as other:
        yield int(other.samplerate), _read_soundfile(other)


def _find_wav_error(file: str | BytesIO) -> Exception | None:
    """Why the standard library cannot read a file; None if it can."""
    try:
        with wave.open(file, "rb") as opened:
            width = opened.getsampwidth()
    except (wave.Error, EOFError) as error:
        return error
    return None if width in (*_WIDTHS, 3) else wave.Error(f"samples of {width} bytes")


def _read_wav(file: wave.Wave_read) -> Iterator[Tensor]:
    width, channels = file.getsampwidth(), file.getnchannels()
    while data := file.readframes(max(BLOCK // channels, 1)):
        data = data[: len(data) // (width * channels) * width * channels]
        if width == 3:  # 24 bits are read as the upper bytes of 32
            three = np.frombuffer(data, "u1").reshape(-1, 3)
            data = np.pad(three, ((0, 0), (1, 0))).tobytes()
        values = torch.from_numpy(np.frombuffer(data, _WIDTHS.get(width, _WIDTHS[4])).copy())
        yield _scale(values).reshape(-1, channels).T


def _open_soundfile(file: str | BytesIO, why: Exception) -> Any:
    """Open any file that libsndfile reads."""
    try:
        import soundfile
    except ImportError:
        raise ValueError(
            f"not an integer WAV ({why}), and soundfile, which reads other formats, is not "
            "installed: pip install mmspec[speech]"
        ) from None
    try:
        return soundfile.SoundFile(file)
    except Exception as error:  # libsndfile has its own exceptions
        raise ValueError(f"cannot be read as audio: {first_line(error)}; give another") from None


def _read_soundfile(file: Any) -> Iterator[Tensor]:
    try:
        while len(values := file.read(BLOCK // file.channels, "float32", always_2d=True)):
            yield torch.from_numpy(values).T
    except Exception as error:
        raise ValueError(f"cannot be read as audio: {first_line(error)}; give another") from None


def _to_tensor(given: Any) -> Tensor:
    try:
        samples = torch.as_tensor(given if isinstance(given, Tensor) else np.asarray(given))
    except (TypeError, ValueError):
        raise ValueError(
            f"audio={format_value(given)} is neither a file nor samples; give one, or a tensor (n,)"
        ) from None
    if samples.layout != torch.strided or samples.is_meta:
        raise ValueError(f"audio={format_value(given)} holds no samples; give a dense tensor (n,)")
    if samples.is_complex() or samples.dtype == torch.bool:
        raise ValueError(f"samples of {samples.dtype} are not audio; give floats in [-1, 1]")
    if samples.dtype in UNSCALED_TYPES:
        raise ValueError(
            f"integers of {samples.dtype}, the type of a list of them, have no known full scale; "
            "give the type they were recorded in, such as int16, or floats in [-1, 1]"
        )
    return _scale(samples.detach().cpu())


def _scale(samples: Tensor) -> Tensor:
    """Floats unchanged; integers scaled by the range of their type, unsigned ones around 0."""
    if samples.is_floating_point():
        return samples.float()
    limits = torch.iinfo(samples.dtype)
    middle = 0 if limits.min < 0 else (limits.max + 1) // 2
    return (samples.double() - middle).div(limits.max - middle + 1).float()


def _mix_channels(samples: Tensor) -> Tensor:  # (n,) or (channels, n) -> (n,)
    """Average the channels."""
    if samples.dim() == 2 and 0 < samples.shape[0] <= MAX_CHANNELS:
        samples = samples.mean(0)
    if samples.dim() != 1:
        raise ValueError(
            f"samples of shape {tuple(samples.shape)} are neither (n,) nor (channels, n) of at "
            f"most {MAX_CHANNELS} channels; transpose them, or give several recordings as a list"
        )
    return samples


def _check_samples(samples: Tensor) -> Tensor:  # (n,)
    """The samples themselves. Raises ValueError for empty, non-finite and unscaled ones."""
    if not samples.numel():
        raise ValueError("the audio is empty; give one sample at least")
    _check_finite(samples)
    loudest = max(abs(float(one)) for one in samples.aminmax())
    if loudest > MAX_AMPLITUDE:
        raise ValueError(
            f"samples reach {loudest:g}, and floats must be in [-1, 1]; divide them by their full "
            "scale, or give integers of their original type"
        )
    return samples


def _check_finite(samples: Tensor) -> None:
    if not bool(samples.isfinite().all()):
        count = int((~samples.isfinite()).sum())
        raise ValueError(f"{count} samples are not finite; give finite samples")
