"""What races of models that speak have in common: who listens, and how soon sound comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from mmspec import zoo
from mmspec.api import Accelerated, accelerate
from mmspec.modalities.speech.recognition.word_errors import plain
from mmspec.modality import Answer, Answers, Quality

EARS = ("whisper",)  # recognisers of the zoo, the best one first


def heard(requests: Sequence[Mapping[str, Any]]) -> tuple[list[Quality], dict[str, str]]:
    """The word error rate of what was said, or why nobody listens."""
    texts = [request.get("text") for request in requests]
    if any(one is None for one in texts):
        return [], {}
    ear, why = listener()
    if ear is None:
        return [], {"word error rate": why}
    said = [text for one in texts for text in ([one] if isinstance(one, str) else one or ())]
    return [Quality("word error rate", partial(_errors, ear, said))], {}


def timing(answers: Sequence[Answer], others: Answers) -> dict[str, Any]:
    """How fast speech came, where our loop made it."""
    told = [answer.stats for answer in answers if answer.stats is not None]
    audio = [one.audio_seconds for one in told if one.audio_seconds]
    if not audio:
        return {}
    spent = [one.total_seconds + (one.codec_seconds or 0) for one in told]
    first = [one.first_audio_ms for one in told if one.first_audio_ms is not None]
    jitter = [one.jitter_ms for one in told if one.jitter_ms is not None]
    found = {"real-time factor": sum(spent) / sum(audio)}
    found |= {"first audio ms": fmean(first)} if first else {}
    return {**found, **({"jitter ms": fmean(jitter)} if jitter else {})}


def listener() -> tuple[Accelerated | None, str]:
    """A recogniser, or why there is none."""
    there = [name for name in EARS if name in zoo.names() and zoo.is_present(name)]
    if not there:
        return None, f"no recogniser of the zoo is there ({', '.join(EARS)})"
    if find_spec("jiwer") is None:
        return None, "word errors need jiwer: pip install mmspec[speech]"
    return accelerate(f"zoo:{there[0]}", "plain"), ""


def _errors(
    ear: Accelerated, texts: Sequence[str], answers: Sequence[Answer], others: Answers
) -> list[tuple[float, float]]:
    """Of every text the share of words that are heard wrong, and its number of words."""
    import jiwer

    waveforms = [waveform for answer in answers for waveform in answer.output.waveforms]
    rate, found = answers[0].output.sampling_rate, []
    for text, waveform in zip(texts, waveforms, strict=True):
        said = plain(text)
        heard = ear.transcribe(waveform, sampling_rate=rate).texts[0] if len(waveform) else ""
        found.append((float(jiwer.wer(said, plain(heard))), float(len(said.split()))))
    return found
