"""Who listens to speech: a recogniser of the zoo, and word errors by jiwer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmspec import zoo
from mmspec.api import Accelerated, accelerate

EARS = ("whisper",)  # recognisers of the zoo, the best one first


def listener() -> tuple[Accelerated | None, str]:
    """A recogniser, or why there is none."""
    there = [name for name in EARS if name in zoo.names() and zoo.is_present(name)]
    if not there:
        return None, f"no recogniser of the zoo is there ({', '.join(EARS)})"
    try:
        import jiwer  # noqa: F401
    except ImportError:
        return None, "word errors need jiwer: pip install mmspec[speech]"
    name = f"zoo:{there[0]}"
    return accelerate(name, "plain"), ""


def word_errors(
    ear: Any, texts: Sequence[str], waveforms: Sequence[Tensor], rate_hz: int
) -> list[tuple[float, float]]:
    """Of every text the share of words that are heard wrong, and its number of words."""
    import jiwer

    found = []
    for text, waveform in zip(texts, waveforms, strict=True):
        words = plain(text)
        heard = plain(ear.transcribe(waveform, sampling_rate=rate_hz).text) if len(waveform) else ""
        found.append((float(jiwer.wer(words, heard)), float(len(words.split()))))
    return found


def plain(text: str) -> str:
    """Words without case and marks, as word errors count them."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())
