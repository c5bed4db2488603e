"""Change the sampling rate of audio, with bounded memory, for any two rates."""

from __future__ import annotations

from math import ceil, gcd, pi

import torch
from torch import Tensor

ZEROS, ROLLOFF = 6, 0.99  # zero crossings of the filter, part of the band kept; as torchaudio's
BLOCK = 1 << 18  # products computed at once


def resample(samples: Tensor, rate_hz: int, to_hz: int) -> Tensor:  # (n,) -> (ceil(n * to / rate),)
    """Resample by a Hann-windowed sinc: what `torchaudio.functional.resample` computes.

    torchaudio's filter has `rate * to / gcd**2` entries, gigabytes for 44,101 Hz. Here each of the
    `to / gcd` phases has only the taps that are not zero, and blocks of outputs read theirs.
    """
    step, phases = rate_hz // gcd(rate_hz, to_hz), to_hz // gcd(rate_hz, to_hz)
    width = ceil(ZEROS * max(step / phases, 1) / ROLLOFF)
    weights = _make_filter(step, phases, width)
    taps = weights.shape[1]
    count = ceil(len(samples) * phases / step)
    made = torch.empty(ceil(count / phases), phases)
    starts = torch.arange(phases) * step // phases
    periods = max(BLOCK // weights.numel(), 1)
    for first in range(0, len(made), periods):
        block = made[first : first + periods]
        at, size = first * step - width, len(block) * step + taps
        part = samples[max(at, 0) : at + size]
        missing = max(-at, 0), at + size - max(at, 0) - len(part)
        windows = torch.nn.functional.pad(part, missing).unfold(0, taps, 1)
        rows = torch.arange(len(block))[:, None] * step + starts
        torch.sum(windows[rows] * weights, -1, out=block)
    return made.flatten()[:count]


def _make_filter(step: int, phases: int, width: int) -> Tensor:  # -> (phases, 2 * width + 1)
    """The weights of the samples around each output of a period of `step` samples."""
    scale = ROLLOFF * min(1.0, phases / step)
    offsets = torch.arange(phases, dtype=torch.float64) * step % phases / phases
    times = (torch.arange(-width, width + 1) - offsets[:, None]) * scale
    times = times.clamp(-ZEROS, ZEROS)
    return (torch.sinc(times) * (times * pi / ZEROS / 2).cos().square() * scale).float()
