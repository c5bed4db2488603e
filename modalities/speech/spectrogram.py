"""Draw spectrograms, coloured by the round that accepted each part."""

from __future__ import annotations

import colorsys

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from mmspec._renamed import rename_attributes

HEIGHT, STRIP, EDGE = 192, 14, 8  # pixels: spectrogram, strip of frames below it, margin
WIDTH = 1024  # pixels of a spectrogram
FLOOR_DB = 70.0  # below the maximum
GOLDEN = 0.381966  # of the hue circle from round to round, so that neighbours differ


def draw_spectrogram(
    waveform: Tensor, rounds: Tensor, sampling_rate: int, parts: str = "frames"
) -> Image.Image:
    """Draw a waveform (S,) whose `parts` were accepted in `rounds` (T,).

    Brightness is the power at a frequency (linear, 0 Hz at the bottom), hue the round. The strip
    below has one field per frame; adjacent frames of one colour took one target call.
    """
    light = _levels(waveform)
    columns = torch.arange(light.shape[1]) * max(len(rounds), 1) // light.shape[1]
    turns = rounds[columns.clamp_max(len(rounds) - 1)] if len(rounds) else columns
    hues = torch.tensor([_hue(int(turn)) for turn in turns.tolist()])  # (W, 3)
    pixels = (light[..., None] * hues * 255).byte()
    made = Image.new("RGB", (WIDTH + 2 * EDGE, HEIGHT + 3 * EDGE + STRIP + 14), "white")
    made.paste(Image.fromarray(pixels.numpy(), "RGB"), (EDGE, EDGE))
    pen = ImageDraw.Draw(made)
    top = HEIGHT + 2 * EDGE
    for frame, turn in enumerate(rounds.tolist()):
        left, right = (EDGE + at * WIDTH // len(rounds) for at in (frame, frame + 1))
        red, green, blue = (round(255 * part) for part in _hue(turn))
        pen.rectangle((left, top, max(right - 1, left), top + STRIP), fill=(red, green, blue))
    seconds = len(waveform) / sampling_rate
    caption = f"{seconds:.2f} s, {len(rounds)} {parts} in {len(rounds.unique())} rounds"
    pen.text((EDGE, top + STRIP + 2), caption, fill="black")
    pen.text((WIDTH + EDGE, top + STRIP + 2), f"0 to {sampling_rate // 2} Hz", "black", anchor="ra")
    return made


def _levels(waveform: Tensor) -> Tensor:  # (HEIGHT, WIDTH) of 0 to 1, high frequencies on top
    """Power in decibels above the floor, the maximum at 1."""
    window = 512
    padded = torch.nn.functional.pad(waveform.float(), (0, max(window - len(waveform), 0)))
    hop = max(len(padded) // WIDTH, 1)
    shape = torch.hann_window(window)
    power = torch.stft(padded, window, hop, window=shape, return_complex=True).abs().square()
    decibels = 10 * (power.clamp_min(1e-10) / power.amax().clamp_min(1e-10)).log10()
    light = (1 + decibels / FLOOR_DB).clamp(0, 1).flip(0)
    sized = torch.nn.functional.interpolate(light[None, None], (HEIGHT, WIDTH), mode="bilinear")
    return sized[0, 0]


def _hue(turn: int) -> tuple[float, float, float]:
    return colorsys.hsv_to_rgb(turn * GOLDEN % 1, 0.65, 1)


__getattr__ = rename_attributes(__name__, {"spectrogram": "draw_spectrogram"})
