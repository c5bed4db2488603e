"""Sound files: WAV by the standard library."""

from __future__ import annotations

import wave
from pathlib import Path

from torch import Tensor


def write(path: str | Path, samples: Tensor, rate_hz: int) -> Path:
    """Samples (n,) as a WAV file of 16 bits; what is beyond -1..1 is clipped.

    Raises ValueError for samples that are not finite.
    """
    if samples.dim() != 1 or not bool(samples.isfinite().all()):
        raise ValueError(f"samples of shape {tuple(samples.shape)} are no (n,) finite numbers")
    whole = (samples.float().clamp(-1, 1) * 32767).round().short().cpu()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes(whole.numpy().tobytes())
    return Path(path)
