"""Word error rates, by jiwer (`pip install mmspec[speech]`), and real-time factors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from mmspec.modality import Quality, RunResult, RunResults

Words = Sequence[Sequence[str]]  # per request, per row


def word_error_rate(references: Words) -> Quality:
    """Errors per word said, of answers whose `output` holds the texts."""
    jiwer = _jiwer()

    def judge(answers: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        pairs = [
            (plain(said), plain(text))
            for texts, answer in zip(references, answers, strict=True)
            for said, text in zip(texts, answer.output.texts, strict=True)
        ]
        return [(jiwer.wer(said, text), len(said.split())) for said, text in pairs]

    return Quality("word error rate", judge)


def plain(text: str) -> str:
    """In lower case, without marks, as word errors are counted."""
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


def rates(seconds: Sequence[float], answers: Sequence[RunResult]) -> Mapping[str, Any]:
    """The real-time factor: seconds of work per second of sound; of the last repeat."""
    spent = sum(answer.output.seconds for answer in answers)
    return {"real-time factor": spent / sum(seconds), "audio seconds": sum(seconds)}


def _jiwer() -> ModuleType:
    try:
        import jiwer
    except ImportError:
        raise ValueError("word errors are counted by jiwer: pip install mmspec[speech]") from None
    return jiwer
