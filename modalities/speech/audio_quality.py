"""Quality of synthesized speech: word errors of a recogniser, and latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from torch import Tensor

from mmspec import zoo
from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.modalities.speech.recognition.word_errors import normalize_text
from mmspec.modality import Quality, RunResult, RunResults

RECOGNISERS = ("whisper",)  # bundled recognisers, the best one first


@dataclass(frozen=True)
class ReferenceAudio:
    """The output of a model's own `generate()`."""

    waveforms: list[Tensor]
    sampling_rate: int


def recognition_quality(
    requests: Sequence[Mapping[str, Any]],
) -> tuple[list[Quality], dict[str, str]]:
    """The word error rate of the output, or why it cannot be measured."""
    texts = [request.get("text") for request in requests]
    if any(one is None for one in texts):
        return [], {}
    recogniser, why = load_recogniser()
    if recogniser is None:
        return [], {"word error rate": why}
    flat = [text for one in texts for text in ([one] if isinstance(one, str) else one or ())]
    return [Quality("word error rate", partial(_judge_words, recogniser, flat))], {}


def speech_timing(results: Sequence[RunResult], others: RunResults) -> dict[str, Any]:
    """Real-time factor, first audio and jitter, of results of our loop."""
    stats = [result.stats for result in results if result.stats is not None]
    audio = [one.audio_seconds for one in stats if one.audio_seconds]
    if not audio:
        return {}
    spent = [one.total_seconds + (one.codec_seconds or 0) for one in stats]
    first = [one.first_audio_ms for one in stats if one.first_audio_ms is not None]
    jitter = [one.jitter_ms for one in stats if one.jitter_ms is not None]
    found = {"real-time factor": sum(spent) / sum(audio)}
    found |= {"first audio ms": fmean(first)} if first else {}
    return {**found, **({"jitter ms": fmean(jitter)} if jitter else {})}


def _judge_words(
    recogniser: Accelerated, texts: Sequence[str], results: Sequence[RunResult], others: RunResults
) -> list[tuple[float, float]]:
    waveforms = [waveform for result in results for waveform in result.output.waveforms]
    return word_errors(recogniser, texts, waveforms, results[0].output.sampling_rate)


def load_recogniser() -> tuple[Accelerated | None, str]:
    """Load a bundled recogniser, or return why there is none."""
    present = [name for name in RECOGNISERS if name in zoo.names() and zoo.is_present(name)]
    if not present:
        return None, f"no bundled recogniser is present ({', '.join(RECOGNISERS)})"
    if find_spec("jiwer") is None:
        return None, "word errors need jiwer: pip install mmspec[speech]"
    return accelerate(f"zoo:{present[0]}", "plain"), ""


def word_errors(
    recogniser: Accelerated, texts: Sequence[str], waveforms: Sequence[Tensor], rate_hz: int
) -> list[tuple[float, float]]:
    """The word error rate of each waveform, and the number of words of its text."""
    import jiwer

    found = []
    for text, waveform in zip(texts, waveforms, strict=True):
        reference, transcript = normalize_text(text), ""
        if len(waveform):
            transcript = recogniser.transcribe(waveform, sampling_rate=rate_hz).texts[0]
        errors = float(jiwer.wer(reference, normalize_text(transcript)))
        found.append((errors, float(len(reference.split()))))
    return found
