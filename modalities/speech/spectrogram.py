"""Draw spectrograms, coloured by how many parts each round accepted."""

from __future__ import annotations

from itertools import pairwise

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from mmspec._renamed import rename_attributes
from mmspec.tracing.palette import GREEN, GREY, ORANGE, PINK, SKY, YELLOW, to_rgb

HEIGHT, STRIP, EDGE = 192, 14, 8  # pixels: spectrogram, strip of rounds below it, margin
LINE = 14  # pixels of a line of text
WIDTH = 1024  # pixels of a spectrogram
FLOOR_DB = 70.0  # below the maximum
MAX_TICKS = 12  # of the time axis
# of a round that accepted 1, 2, ... parts; the last colour is of as many or more
COLOURS = tuple(map(to_rgb, (GREY, SKY, GREEN, YELLOW, ORANGE, PINK)))


def draw_spectrogram(
    waveform: Tensor, rounds: Tensor, sampling_rate: int, parts: str = "frames"
) -> Image.Image:
    """Draw a waveform (S,) whose `parts` were accepted in `rounds` (T,).

    Brightness is the power at a frequency (linear, 0 Hz at the bottom), the colour how many parts
    the round accepted, which took one target call. The strip below has one field per round, above
    a time axis.
    """
    _, place, counts = rounds.unique(return_inverse=True, return_counts=True)
    kinds = counts[place].clamp_max(len(COLOURS)) - 1  # (T,)
    light = measure_levels(waveform)
    columns = torch.arange(light.shape[1]) * max(len(rounds), 1) // light.shape[1]
    hues = torch.tensor(COLOURS)[kinds[columns] if len(rounds) else columns]  # (W, 3)
    pixels = (light[..., None] * hues).byte()
    size = (WIDTH + 2 * EDGE, HEIGHT + STRIP + 2 * LINE + 4 * EDGE)
    made = Image.new("RGB", size, "white")
    made.paste(Image.fromarray(pixels.numpy(), "RGB"), (EDGE, EDGE))
    pen, top = ImageDraw.Draw(made), HEIGHT + 2 * EDGE
    _draw_rounds(pen, top, rounds.tolist(), kinds.tolist())
    seconds = len(waveform) / sampling_rate
    _draw_axis(pen, top + STRIP, seconds)
    caption = f"{seconds:.2f} s, {len(rounds)} {parts} in {len(counts)} rounds of"
    _draw_legend(pen, size[1] - LINE - EDGE, caption, parts)
    pen.text((WIDTH + EDGE, size[1] - EDGE), f"0 to {sampling_rate // 2} Hz", "black", anchor="rd")
    return made


def _draw_rounds(pen: ImageDraw.ImageDraw, top: int, rounds: list[int], kinds: list[int]) -> None:
    """One field per round, with a gap between two where there is room."""
    starts = [at for at in range(len(rounds)) if at == 0 or rounds[at] != rounds[at - 1]]
    for first, end in pairwise([*starts, len(rounds)]):
        left, right = (EDGE + at * WIDTH // len(rounds) for at in (first, end))
        gap = 2 if right - left > 3 else 1
        pen.rectangle((left, top, max(right - gap, left), top + STRIP), fill=COLOURS[kinds[first]])


def _draw_axis(pen: ImageDraw.ImageDraw, top: int, seconds: float) -> None:
    """Ticks at multiples of 1, 2 or 5 times a power of ten."""
    steps = (base * 10.0**power for power in range(-3, 6) for base in (1, 2, 5))
    step = next(one for one in steps if seconds <= MAX_TICKS * one)
    for tick in range(int(seconds / step) + 1):
        left = EDGE + round(tick * step / max(seconds, step) * (WIDTH - 1))
        pen.line((left, top, left, top + EDGE // 2), fill="black")
        anchor = "la" if tick == 0 else "ma" if left < WIDTH - 2 * EDGE else "ra"
        pen.text((left, top + EDGE // 2), f"{tick * step:g} s", "black", anchor=anchor)


def _draw_legend(pen: ImageDraw.ImageDraw, top: int, caption: str, parts: str) -> None:
    pen.text((EDGE, top), caption, "black")
    left = EDGE + pen.textlength(caption) + EDGE
    for count, colour in enumerate(COLOURS, 1):
        label = f"{count}{'+' * (count == len(COLOURS))}"
        pen.rectangle((left, top + 1, left + LINE, top + LINE - 2), fill=colour)
        pen.text((left + LINE + 4, top), label, "black")
        left += LINE + 4 + pen.textlength(label) + EDGE
    pen.text((left, top), parts, "black")


def measure_levels(
    waveform: Tensor,
) -> Tensor:  # (HEIGHT, WIDTH) of 0 to 1, high frequencies on top
    """Power in decibels above the floor as 0 to 1, the maximum at 1."""
    window = 512
    padded = torch.nn.functional.pad(waveform.float(), (0, max(window - len(waveform), 0)))
    hop = max(len(padded) // WIDTH, 1)
    shape = torch.hann_window(window)
    power = torch.stft(padded, window, hop, window=shape, return_complex=True).abs().square()
    decibels = 10 * (power.clamp_min(1e-10) / power.amax().clamp_min(1e-10)).log10()
    light = (1 + decibels / FLOOR_DB).clamp(0, 1).flip(0)
    sized = torch.nn.functional.interpolate(light[None, None], (HEIGHT, WIDTH), mode="bilinear")
    return sized[0, 0]


__getattr__ = rename_attributes(__name__, {"spectrogram": "draw_spectrogram"})
