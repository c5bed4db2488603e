"""Spectrograms: a colour means one thing, whatever the number of rounds, and time has an axis."""

from __future__ import annotations

from itertools import groupby

import pytest
import torch

from mmspec.modalities.speech.spectrogram import (
    COLOURS,
    EDGE,
    HEIGHT,
    STRIP,
    WIDTH,
    draw_spectrogram,
)

MIDDLE = HEIGHT + 2 * EDGE + STRIP // 2  # of the strip of rounds


@pytest.mark.parametrize("sizes", [[1, 2, 3], [2] * 80, [1, 9, 1, 1, 30]], ids=len)
def test_a_colour_is_how_much_a_round_accepted(sizes: list[int]) -> None:
    rounds = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    made = draw_spectrogram(torch.rand(16000), rounds, 16000)
    row = [made.getpixel((EDGE + left, MIDDLE)) for left in range(WIDTH)]
    fields = [colour for colour, _ in groupby(row) if colour != (255, 255, 255)]
    assert fields == [COLOURS[min(size, len(COLOURS)) - 1] for size in sizes]


@pytest.mark.parametrize(("seconds", "ticks"), [(0.001, 2), (0.5, 11), (2.0, 11), (95.0, 10)])
def test_time_has_an_axis(seconds: float, ticks: int) -> None:
    made = draw_spectrogram(torch.zeros(int(100_000 * seconds)), torch.arange(60), 100_000)
    line = [made.getpixel((left, HEIGHT + 2 * EDGE + STRIP + 2)) for left in range(made.width)]
    assert line.count((0, 0, 0)) == ticks


@pytest.mark.parametrize("samples", [0, 1, 600])
def test_next_to_nothing_is_drawn_too(samples: int) -> None:
    made = draw_spectrogram(torch.zeros(samples), torch.zeros(0, dtype=torch.int64), 16000)
    assert made.width == WIDTH + 2 * EDGE
