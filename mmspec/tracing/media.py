"""Pictures and sounds as data URIs, for the views of a trace."""

from __future__ import annotations

import wave
from base64 import b64encode
from io import BytesIO

import numpy as np
from PIL import Image
from torch import Tensor

LONGEST = 512  # pixels of a picture's longer side
SMALL = 24_000  # bytes of a PNG that is kept as it is
PEAKS = 900  # columns of a waveform
MOST_SAMPLES = 2_000_000  # of a sound in a page; a longer one is left out


def image_uri(image: Image.Image, longest: int = LONGEST) -> str:
    """An image of at most `longest` pixels a side as PNG, or as WebP where that is smaller."""
    shown = image.convert("RGB")
    shown.thumbnail((longest, longest))
    found = []
    for kind, options in (("png", {"optimize": True}), ("webp", {"quality": 85})):
        stream = BytesIO()
        shown.save(stream, kind, **options)
        found.append((len(stream.getvalue()), kind, stream.getvalue()))
    _, kind, data = found[0] if found[0][0] < SMALL else min(found)
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def sound_uri(samples: Tensor, rate_hz: int) -> str:  # (S,) in -1 to 1
    """A sound as WAV of 16 bits; silence where it is too long for a page."""
    short = samples[:MOST_SAMPLES] if len(samples) <= MOST_SAMPLES else samples[:0]
    values = (short.float().clamp(-1, 1) * 32767).round().cpu().numpy().astype("<i2")
    stream = BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(values.tobytes())
    return f"data:audio/wav;base64,{b64encode(stream.getvalue()).decode()}"


def find_peaks(samples: Tensor) -> list[list[float]]:  # (S,)
    """The smallest and the largest sample of each column of a waveform, the loudest at 1."""
    values = samples.float().cpu().numpy()
    parts = np.array_split(values, min(PEAKS, max(len(values), 1)))
    highest = max(float(np.abs(values).max()) if len(values) else 0.0, 1e-9)
    pairs = [(part.min() / highest, part.max() / highest) for part in parts if len(part)]
    return [[round(float(low), 3), round(float(high), 3)] for low, high in pairs]
