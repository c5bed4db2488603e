"""Speech as it comes: verified frames become sound, and when they did is noted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import pstdev
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.draft import Round
from mmspec.modalities.speech import sound
from mmspec.modalities.speech.codecs import Codec
from mmspec.modality import Call, Loop
from mmspec.stats import Stats


class Framing(Protocol):
    """How a row's new tokens become frames."""

    @property
    def latest(self) -> int: ...  # tokens behind its own first that a frame is whole at

    def codes(self, tokens: Sequence[Any]) -> Tensor: ...  # the whole frames (K, T)
    def whole(self, tokens: Sequence[Any]) -> int: ...  # how many those are, without a look at all
    def is_over(self, tokens: Sequence[Any]) -> bool: ...  # whether no more will come


@dataclass(frozen=True)
class Speech:
    """What `synthesize` returns; rows may be of different lengths."""

    waveforms: list[Tensor]  # per row (S,) float32, about -1 to 1
    sampling_rate: int  # Hz
    codes: list[Tensor]  # per row (K, T) int64
    rounds: list[Tensor]  # per row (T,) int64: the round that a frame was whole in
    stats: Stats

    @property
    def waveform(self) -> Tensor:  # (S,)
        """Of the first row."""
        return self.waveforms[0]

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write WAV files: one, or one per row, numbered. Raises ValueError where none can be."""
        file = Path(path)
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


class SpeakingLoop:
    """A loop whose rounds can be heard: `partial()` of a round are the waveforms so far.

    Sound that later frames would still change is held back (`Codec.settled`) until they are there
    or the row has ended; so a waveform only ever grows, and the last one is that of the output.
    """

    def __init__(self, loop: Loop, codec: Codec, framing: Framing) -> None:
        self.loop, self.codec, self.framing = loop, codec, framing
        self.tokens: list[list[Any]] = []
        self.rounds: list[list[int]] = []
        self.arrivals: list[float] = []  # seconds until sound came
        self.seconds = self.codec_seconds = 0.0
        self.heard = 0  # samples
        self.finished: Stats | None = None

    @property
    def is_watched(self) -> bool:
        return self.loop.is_watched

    def __call__(self, call: Call) -> Iterator[Round]:
        for kept in self.loop(replace(call, view=self.partial)):
            self._note(kept)
            yield kept

    def stats(self) -> Stats:
        return self.loop.stats() if self.finished is None else self.finished

    def report(self, stats: Stats) -> None:
        self.loop.report(stats)

    def partial(self, tokens: Sequence[Sequence[Any]]) -> list[Tensor]:
        """The final part of the sound of so many tokens, per row (S,)."""
        begun = perf_counter()
        made = []
        for row in tokens:
            waveform = self.codec.decode(self.framing.codes(row))
            made.append(waveform[: self._audible(row)])
        self.codec_seconds += perf_counter() - begun
        return made

    def speech(self) -> Speech:
        """All that was said."""
        codes, latest = [self.framing.codes(row) for row in self.tokens], self.framing.latest
        begun = perf_counter()
        waveforms = [self.codec.decode(one) for one in codes]
        self.codec_seconds += perf_counter() - begun
        rounds = [
            torch.tensor(row[latest : latest + one.shape[1]], dtype=torch.int64)
            for row, one in zip(self.rounds, codes, strict=True)
        ]
        self.finished = self._timed(self.loop.stats(), sum(map(len, waveforms)))
        self.loop.report(self.finished)
        return Speech(waveforms, self.codec.sampling_rate, codes, rounds, self.finished)

    def _note(self, kept: Round) -> None:
        """What a round brought, and whether something more can be heard of any row."""
        self.tokens = self.tokens or [[] for _ in kept.tokens]
        self.rounds = self.rounds or [[] for _ in kept.tokens]
        for row, new in enumerate(kept.tokens):
            self.tokens[row].extend(new)
            self.rounds[row].extend([kept.index] * len(new))
        self.seconds += sum(kept.seconds.values())
        heard = sum(map(self._audible, self.tokens))
        if heard > self.heard:
            self.heard = heard
            self.arrivals.append(self.seconds + self.codec_seconds)

    def _audible(self, tokens: Sequence[Any]) -> int:
        """Samples of a row that will not change any more."""
        frames = self.framing.whole(tokens)
        if self.framing.is_over(tokens):
            return frames * self.codec.hop
        return self.codec.settled(frames)

    def _timed(self, stats: Stats, samples: int) -> Stats:
        gaps = [then - now for now, then in zip(self.arrivals, self.arrivals[1:], strict=False)]
        return replace(
            stats,
            first_audio_ms=1e3 * self.arrivals[0] if self.arrivals else None,
            jitter_ms=1e3 * pstdev(gaps) if gaps else None,
            audio_seconds=samples / self.codec.sampling_rate,
            codec_seconds=self.codec_seconds,
        )
