"""A picture of how a transcript was written: a spectrogram, and below it the tokens of every round.

Tokens are spread evenly over the sound, in the order they were written: a round's span shows how
much of the transcript it brought, not where in the sound that was heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from mmspec.modalities.sheets import colour
from mmspec.modalities.speech.sound import Sound

WIDE, HIGH, BAR, EDGE, LINE = 900, 160, 22, 8, 14  # pixels
FRAMES, BANDS = 450, 256  # of the spectrogram
QUIET_DB = 70.0  # below the loudest: white


def sheet(sound: Sound, rounds: Sequence[int], words: Sequence[str], text: str) -> Image.Image:
    """`rounds` are tokens per round, and `words` the tokens as they read, all of them."""
    made = Image.new("RGB", (WIDE + 2 * EDGE, HIGH + BAR + 3 * LINE + 4 * EDGE), "white")
    made.paste(spectrogram(sound).resize((WIDE, HIGH)), (EDGE, EDGE))
    pen, top = ImageDraw.Draw(made), HIGH + 2 * EDGE
    total, ends = max(sum(rounds), 1), list(accumulate(rounds))
    for index, (count, end) in enumerate(zip(rounds, ends, strict=True)):
        left, right = (EDGE + WIDE * at // total for at in (end - count, end))
        pen.rectangle((left, top, right, top + BAR), fill=colour(index, len(rounds) - 1))
        pen.line([(left, EDGE), (left, top + BAR)], fill="#bbbbbb")
        own = "".join(words[end - count : end])
        pen.text(
            (left + 2, top + BAR + 2 + LINE * (index % 2)), own[: _fits(right - left)], "black"
        )
    said = f"{len(rounds)} rounds, {sum(rounds)} tokens, {sound.seconds:.1f} s: {text}"
    pen.text((EDGE, top + BAR + 2 * LINE + 6), said[: _fits(WIDE)], fill="black")
    return made


def spectrogram(sound: Sound) -> Image.Image:
    """Dark where it is loud; time to the right, frequency upwards to half the rate."""
    hop = max(sound.samples.shape[0] // FRAMES, 1)
    samples = torch.nn.functional.pad(sound.samples, (0, 2 * BANDS))
    window = torch.hann_window(2 * BANDS)
    found: Tensor = torch.stft(samples, 2 * BANDS, hop, window=window, return_complex=True)
    loud = 20 * found.abs().clamp_min(1e-8).log10()
    shade = ((loud.max() - loud) / QUIET_DB).clamp(0, 1).flip(0)
    picture: Any = (255 * shade).to(torch.uint8).numpy()
    return Image.fromarray(picture).convert("RGB")


def _fits(pixels: int) -> int:
    """Letters that a span has room for, in every other line."""
    return max(2 * pixels // 6, 1)
