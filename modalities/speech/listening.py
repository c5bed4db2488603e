"""Who listens to speech: a recogniser of the zoo, and word errors by jiwer."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from torch import Tensor

from mmspec import zoo
from mmspec.api import Accelerated, accelerate
from mmspec.modalities.speech.recognition.word_errors import plain

EARS = ("whisper",)  # recognisers of the zoo, the best one first


def listener() -> tuple[Accelerated | None, str]:
    """A recogniser, or why there is none."""
    there = [name for name in EARS if name in zoo.names() and zoo.is_present(name)]
    if not there:
        return None, f"no recogniser of the zoo is there ({', '.join(EARS)})"
    if find_spec("jiwer") is None:
        return None, "word errors need jiwer: pip install mmspec[speech]"
    return accelerate(f"zoo:{there[0]}", "plain"), ""


def word_errors(
    ear: Accelerated, texts: Sequence[str], waveforms: Sequence[Tensor], rate_hz: int
) -> list[tuple[float, float]]:
    """Of every text the share of words that are heard wrong, and its number of words."""
    import jiwer

    found = []
    for text, waveform in zip(texts, waveforms, strict=True):
        said = plain(text)
        heard = ear.transcribe(waveform, sampling_rate=rate_hz).texts[0] if len(waveform) else ""
        found.append((float(jiwer.wer(said, plain(heard))), float(len(said.split()))))
    return found
