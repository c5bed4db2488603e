"""Training windows of recognisers: audio with timed sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmspec.modalities.speech.utterances import RATE_HZ, utterance

_SILENT, _JOINED = 0.02, 0.2  # shares of windows without a sentence, and with a second one


@dataclass(frozen=True)
class Segment:
    """A sentence and its time in the window. The last one may be cut off."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class AudioWindow:
    """waveform: (T,) at `RATE_HZ`."""

    waveform: Tensor
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str | None:
        """The sentence, if there is exactly one."""
        return self.segments[0].text if len(self.segments) == 1 else None


def generate_windows(count: int, seed: int, longest_s: float) -> Iterator[AudioWindow]:
    """Training windows of at most `longest_s`, mostly of one sentence.

    Some have noise alone, others a second sentence, like a window of a longer recording.
    """
    generator = np.random.default_rng((seed, 9))
    for number in range(count):
        kind, window = generator.random(), _make_window((seed << 24) + number)
        if kind < _SILENT:
            window = make_silence(generator, longest_s)
        elif kind < _SILENT + _JOINED:
            other = _make_window((seed << 24) + int(generator.integers(count)))
            window = join_windows(window, other)
        yield AudioWindow(window.waveform[: int(longest_s * RATE_HZ)], window.segments)


def _make_window(seed: int) -> AudioWindow:
    one = utterance(seed)
    return AudioWindow(one.waveform, (Segment(one.text, one.start_s, one.end_s),))


def make_silence(generator: np.random.Generator, longest_s: float) -> AudioWindow:
    length = int(generator.uniform(0.2, longest_s) * RATE_HZ)
    level = float(generator.choice([0.0, 10 ** generator.uniform(-4, -2)]))
    noise = generator.standard_normal(length) * level
    return AudioWindow(torch.from_numpy(noise).float(), ())


def join_windows(first: AudioWindow, second: AudioWindow) -> AudioWindow:
    """Concatenate two windows."""
    later = len(first.waveform) / RATE_HZ
    moved = [Segment(s.text, s.start_s + later, s.end_s + later) for s in second.segments]
    waveform = torch.cat([first.waveform, second.waveform])
    return AudioWindow(waveform, (*first.segments, *moved))
