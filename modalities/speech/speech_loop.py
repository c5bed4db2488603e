"""Decode accepted frames to waveforms as rounds arrive, and record their latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import pstdev
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.draft import Draft, Round
from mmspec.modalities.common import sound
from mmspec.modalities.speech.codecs import Codec, CodecStream
from mmspec.modality import Call, Loop
from mmspec.stats import Stats


class FrameDecoder(Protocol):
    """Convert the new tokens of a row to frames."""

    @property
    def latest(self) -> int: ...  # tokens after its first one until a frame is complete

    def codes(self, tokens: Sequence[Any]) -> Tensor: ...  # the complete frames (K, T)
    def count_frames(self, tokens: Sequence[Any]) -> int: ...  # T, without decoding
    def is_over(self, tokens: Sequence[Any]) -> bool: ...  # whether the row has ended


@dataclass(frozen=True)
class Speech:
    """What `synthesize` returns; rows may differ in length."""

    waveforms: list[Tensor]  # per row (S,) float32, about -1 to 1
    sampling_rate: int  # Hz
    codes: list[Tensor]  # per row (K, T) int64
    rounds: list[Tensor]  # per row (T,) int64: the round that completed each frame
    stats: Stats
    prompt_tokens: int = 0  # of each row, padding included

    @property
    def waveform(self) -> Tensor:  # (S,)
        """The waveform of the first row."""
        return self.waveforms[0]

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write a WAV file, or one per row, numbered. Raises ValueError if it cannot be written."""
        if not isinstance(path, str | Path):
            raise ValueError(f"path={path!r} must be a path; give a file that ends in .wav")
        file = sound.check_ending(Path(path))
        files = [file]
        if len(self.waveforms) > 1:
            files = [file.with_stem(f"{file.stem}-{row}") for row in range(len(self.waveforms))]
        for one in files:
            _check_writable(one)
        for one, waveform in zip(files, self.waveforms, strict=True):
            sound.write(one, waveform, self.sampling_rate)
        return tuple(files)


def _check_writable(file: Path) -> None:
    try:
        file.open("ab").close()
    except OSError as error:
        raise ValueError(f"{file} cannot be written ({error.strerror}); choose another") from error


class SpeechStream:
    """The waveform of one row whose tokens come in pieces, without a loop."""

    def __init__(self, codec: Codec, frames: FrameDecoder) -> None:
        self.codec, self.frames, self.stream = codec, frames, CodecStream(codec)
        self.tokens: list[Any] = []

    def extend(self, tokens: Sequence[Any]) -> Tensor:  # (n,)
        """The samples that are final now and were not before; at the end of the row, all."""
        self.tokens.extend(tokens)
        done = len(self.stream.samples)
        count = count_final_samples(self.codec, self.frames, self.tokens)
        self.stream.extend(self.frames.codes(self.tokens), count)
        return self.stream.samples[done:]


def count_final_samples(codec: Codec, frames: FrameDecoder, tokens: Sequence[Any]) -> int:
    """The number of samples of a row that later frames do not change."""
    count = frames.count_frames(tokens)
    return count * codec.hop if frames.is_over(tokens) else codec.final_samples(count)


class SpeechLoop:
    """A loop whose rounds return waveforms: `partial()` of a round are the waveforms so far.

    Samples that later frames would change are withheld (`Codec.final_samples`) until the frames
    are accepted or the row ends, so a waveform only grows, and the last one is the output.
    """

    def __init__(self, loop: Loop, codec: Codec, frames: FrameDecoder, start: float) -> None:
        self.loop, self.codec, self.frames, self.start = loop, codec, frames, start
        self.tokens: list[list[Any]] = []
        self.rounds: list[list[int]] = []
        self.streams: list[CodecStream] = []
        self.first_audio: float | None = None  # seconds from `start`, a `perf_counter()`
        self.first_round: int | None = None  # the round that completed the first samples, from 1
        self.arrivals: list[float] = []  # seconds of computation until new samples were final
        self.seconds = self.codec_seconds = 0.0
        self.audible_samples = 0  # samples
        self.finished: Stats | None = None
        self.prompt_tokens = 0

    @property
    def is_watched(self) -> bool:
        return True  # by this object, which decodes them

    def __call__(self, call: Call) -> Iterator[Round]:
        request: Any = call.request
        self.prompt_tokens = request.inputs["input_ids"].shape[1]
        for round_ in self.loop(replace(call, view=self.partial)):
            self._record(round_)
            yield round_

    def stats(self) -> Stats:
        return self.loop.stats() if self.finished is None else self.finished

    def report(self, stats: Stats) -> None:
        self.loop.report(stats)

    def show(self, round_: Round, draft: Draft, states: Any) -> None:
        self.loop.show(round_, draft, states)

    def partial(self, tokens: Sequence[Sequence[Any]]) -> list[Tensor]:
        """The final samples of the tokens so far, per row (S,)."""
        start = perf_counter()
        self.streams = self.streams or [CodecStream(self.codec) for _ in tokens]
        counts = [*map(self._count_final_samples, tokens)]
        for stream, row, count in zip(self.streams, tokens, counts, strict=True):
            stream.extend(self.frames.codes(row), count)
        self.codec_seconds += perf_counter() - start
        if self.first_audio is None and any(counts):
            self.first_audio = perf_counter() - self.start
        return [
            one.samples[:count].clone() for one, count in zip(self.streams, counts, strict=True)
        ]

    def speech(self) -> Speech:
        """The complete output; reports its statistics."""
        codes, latest = [self.frames.codes(row) for row in self.tokens], self.frames.latest
        start = perf_counter()
        streams = self.streams or [CodecStream(self.codec) for _ in codes]
        waveforms = [stream.complete(one) for stream, one in zip(streams, codes, strict=True)]
        self.codec_seconds += perf_counter() - start
        rounds = [
            torch.tensor(row[latest : latest + one.shape[1]], dtype=torch.int64)
            for row, one in zip(self.rounds, codes, strict=True)
        ]
        self.finished = self._add_audio_stats(self.loop.stats(), sum(map(len, waveforms)))
        self.loop.report(self.finished)
        rate_hz, stats = self.codec.sampling_rate, self.finished
        return Speech(waveforms, rate_hz, codes, rounds, stats, self.prompt_tokens)

    def _record(self, round_: Round) -> None:
        """Add the tokens of a round; note the time if they complete samples of any row."""
        self.tokens = self.tokens or [[] for _ in round_.tokens]
        self.rounds = self.rounds or [[] for _ in round_.tokens]
        for row, new in enumerate(round_.tokens):
            self.tokens[row].extend(new)
            self.rounds[row].extend([round_.index] * len(new))
        self.seconds += sum(round_.seconds.values())
        samples = sum(map(self._count_final_samples, self.tokens))
        if samples and self.first_round is None:
            self.first_round = round_.index + 1
        if samples and self.first_audio is None:  # not observed: decode them for their time
            self.partial(self.tokens)
        if samples > self.audible_samples:
            self.audible_samples = samples
            self.arrivals.append(self.seconds + self.codec_seconds)

    def _count_final_samples(self, tokens: Sequence[Any]) -> int:
        return count_final_samples(self.codec, self.frames, tokens)

    def _add_audio_stats(self, stats: Stats, samples: int) -> Stats:
        gaps = [then - now for now, then in zip(self.arrivals, self.arrivals[1:], strict=False)]
        return replace(
            stats,
            first_audio_ms=None if self.first_audio is None else 1e3 * self.first_audio,
            first_audio_round=self.first_round,
            jitter_ms=1e3 * pstdev(gaps) if gaps else None,
            audio_seconds=samples / self.codec.sampling_rate,
            codec_seconds=self.codec_seconds,
        )
