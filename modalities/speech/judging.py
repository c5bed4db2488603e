"""What races of models that speak have in common: who listens, and how soon sound comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor

from mmspec.api import Accelerated
from mmspec.modalities.speech.listening import listener, word_errors
from mmspec.modality import Quality, RunResult, RunResults


@dataclass(frozen=True)
class OwnAudio:
    """What a model's own way gave."""

    waveforms: list[Tensor]
    sampling_rate: int


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


def timing(answers: Sequence[RunResult], others: RunResults) -> dict[str, Any]:
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


def _errors(
    ear: Accelerated, texts: Sequence[str], answers: Sequence[RunResult], others: RunResults
) -> list[tuple[float, float]]:
    waveforms = [waveform for answer in answers for waveform in answer.output.waveforms]
    return word_errors(ear, texts, waveforms, answers[0].output.sampling_rate)
