"""What recognisers learn from: windows of sound, and what is said in them from when to when."""

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
    """A sentence and its time in the window. The last may be cut off where the window ends."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class HearingWindow:
    """waveform: (T,) at `RATE_HZ`."""

    waveform: Tensor
    segments: tuple[Segment, ...]

    @property
    def text(self) -> str | None:
        """The one sentence in it; None where there is none or a second begins."""
        return self.segments[0].text if len(self.segments) == 1 else None


def windows(count: int, seed: int, longest_s: float) -> Iterator[HearingWindow]:
    """Training windows of at most `longest_s`, mostly one sentence each; now and then noise alone.

    Others begin with one sentence and go on with the next, as a window of a longer recording.
    """
    generator = np.random.default_rng((seed, 9))
    for number in range(count):
        kind, said = generator.random(), _spoken((seed << 24) + number)
        if kind < _SILENT:
            said = silence(generator, longest_s)
        elif kind < _SILENT + _JOINED:
            said = joined(said, _spoken((seed << 24) + int(generator.integers(count))))
        yield HearingWindow(said.waveform[: int(longest_s * RATE_HZ)], said.segments)


def _spoken(seed: int) -> HearingWindow:
    one = utterance(seed)
    return HearingWindow(one.waveform, (Segment(one.text, one.start_s, one.end_s),))


def silence(generator: np.random.Generator, longest_s: float) -> HearingWindow:
    length = int(generator.uniform(0.2, longest_s) * RATE_HZ)
    level = float(generator.choice([0.0, 10 ** generator.uniform(-4, -2)]))
    noise = generator.standard_normal(length) * level
    return HearingWindow(torch.from_numpy(noise).float(), ())


def joined(first: HearingWindow, second: HearingWindow) -> HearingWindow:
    """One window after the other."""
    later = len(first.waveform) / RATE_HZ
    moved = [Segment(s.text, s.start_s + later, s.end_s + later) for s in second.segments]
    waveform = torch.cat([first.waveform, second.waveform])
    return HearingWindow(waveform, (*first.segments, *moved))
