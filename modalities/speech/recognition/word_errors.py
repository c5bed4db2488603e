"""Word error rates by jiwer (`pip install mmspec[speech]`), and real-time factors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from mmspec.modality import Quality, RunResult, RunResults

Words = Sequence[Sequence[str]]  # per request, per row


def word_error_rate(references: Words) -> Quality:
    """Word error rate of results whose `output` holds the texts."""
    jiwer = _import_jiwer()

    def judge(results: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        pairs = [
            (normalize_text(reference), normalize_text(text))
            for texts, result in zip(references, results, strict=True)
            for reference, text in zip(texts, result.output.texts, strict=True)
        ]
        return [(jiwer.wer(reference, text), len(reference.split())) for reference, text in pairs]

    return Quality("word error rate", judge)


def normalize_text(text: str) -> str:
    """Lower case, without punctuation, for word error rates."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


def real_time_factor(seconds: Sequence[float], results: Sequence[RunResult]) -> Mapping[str, Any]:
    """The real-time factor, seconds of computation per second of audio, of the last repeat."""
    spent = sum(result.output.seconds for result in results)
    return {"real-time factor": spent / sum(seconds), "audio seconds": sum(seconds)}


def _import_jiwer() -> ModuleType:
    try:
        import jiwer
    except ImportError:
        raise ValueError("word error rates need jiwer: pip install mmspec[speech]") from None
    return jiwer
