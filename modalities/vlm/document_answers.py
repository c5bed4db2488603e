"""Accuracy and time of VideoSpeculateRAG on questions about clips of the Scene world.

A large model answers from all documents, or a small one from each of them and the large one selects
(`mmspec.modalities.vlm.video_rag`). Names and key frames are aligned by the small model's own
vision tower, which was trained to give the embeddings of words, in place of CLIP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from mmspec.api import accelerate
from mmspec.bench.answers import measure_answers, report_facts, wrap_answer
from mmspec.bench.compare import PLAIN, Comparison
from mmspec.bench.reporting import Progress, silent
from mmspec.modalities.common.formatting import get_tokenizer
from mmspec.modalities.vlm import LanguageSettings, clips
from mmspec.modalities.vlm.formatting import LanguageFormatter
from mmspec.modalities.vlm.plug import load
from mmspec.modalities.vlm.video_rag import (
    DRAFT,
    DocumentVerdict,
    parse_fields,
    select,
    speculate_from_documents,
)
from mmspec.modality import Runner, RunResult
from mmspec.zoo.clip_documents import DocumentQuestion, document_questions
from mmspec.zoo.clip_questions import score_clip

NAME = "VideoSpeculateRAG"
QUESTIONS = 120
_MAX_NEW_TOKENS = 64
SEED = 5  # of the questions, added to that of the measurement
_BAND = 0.3  # delta of the released code


@dataclass(frozen=True)
class TowerAlignment:
    """Cosine similarity of names and images by a clip model whose vision tower gives embeddings.

    That of a name is the sum of its words'; an image has the one of its most similar slot.
    """

    model: Any
    processor: Any

    @torch.no_grad()
    def __call__(self, names: Sequence[str], pictures: Sequence[Image.Image]) -> Tensor:  # (n, k)
        table = self.model.get_input_embeddings().weight
        tokenizer = get_tokenizer(self.processor)
        words = [tokenizer(name, add_special_tokens=False).input_ids for name in names]
        texts = torch.stack([table[ids].sum(0) for ids in words])
        shown = self.processor.image_processor(images=list(pictures), return_tensors="pt")
        slots = self.model.get_image_features(
            **shown.to(table.device), return_dict=True
        ).pooler_output
        units = functional.normalize(texts.double(), dim=-1)
        alike = [(units @ functional.normalize(one.double(), dim=-1).T).amax(1) for one in slots]
        return torch.stack(alike, 1)


@dataclass(frozen=True)
class DocumentModels:
    """The large model and the small one, as formatters, and the alignment."""

    large: Any
    small: Any
    align: Callable[[Sequence[str], Sequence[Image.Image]], Tensor]

    def speculate(self, asked: DocumentQuestion) -> DocumentVerdict:
        """Answers of the small model to a question, and the large one's verdict."""
        clip, one = read_clip(asked), asked.example
        return speculate_from_documents(
            self.small, self.large, one.prompt, clip, asked.documents, self.align, _BAND
        )


@dataclass(frozen=True)
class DirectAnswer(Runner):
    """One question at a time, answered by one model from all documents."""

    formatter: Any

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        asked: DocumentQuestion = request["asked"]
        prompt = DRAFT.format(question=asked.example.prompt, document=" ".join(asked.documents))
        inputs = self.formatter.request([prompt], videos=[read_clip(asked)])
        out = accelerate(self.formatter.model, "plain").generate(**inputs)
        return wrap_answer(parse_fields(self.formatter.text(out))["answer"])


@dataclass(frozen=True)
class SpeculativeAnswer(Runner):
    """One question at a time, by VideoSpeculateRAG."""

    models: DocumentModels

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        return wrap_answer(self.models.speculate(request["asked"]).answer)


# rules (reliability, alignment, seed -> draft) of selections among the same drafts
_Rule = Callable[[Tensor, Tensor, int], int]
_RULES: Mapping[str, _Rule] = {
    NAME: lambda reliability, alignment, _: select(reliability, alignment, _BAND),
    "delta=0": lambda reliability, alignment, _: select(reliability, alignment, 0.0),
    "delta=1": lambda reliability, alignment, _: select(reliability, alignment, 1.0),
    "one at random": lambda reliability, _, seed: int(
        np.random.default_rng((seed, 20)).integers(len(reliability))
    ),
}


def measure(
    large: str,
    small: Sequence[str],
    timed: int,
    repeats: int = 1,
    seed: int = 0,
    questions: int = QUESTIONS,
    progress: Progress = silent,
) -> Comparison:
    """Answer `questions` in all ways, and time two of them on the first `timed`, one at a time.

    Plain is the large model with all documents. Baselines are other selections of the same drafts:
    the most reliable one (delta = 0), the best aligned one (delta = 1) and one at random; and the
    small model with all documents.
    """
    (name,) = small
    models = make_models(large, name)
    runners = {PLAIN: DirectAnswer(models.large), NAME: SpeculativeAnswer(models)}
    asked = document_questions(max(questions, timed), "held-out", seed + SEED)
    judged = answer_all(models, asked[:questions], seed, progress)

    def facts(results: Sequence[RunResult]) -> list[tuple[int, int]]:
        return [
            score_clip(one.example, result.output)
            for one, result in zip(asked, results, strict=False)
        ]

    requests = [{"asked": one} for one in asked[:timed]]
    return measure_answers(large, "vlm", runners, requests, judged, facts, repeats, seed, progress)


def measure_accuracy(large: str, small: str, count: int) -> dict[str, float]:
    """Shares of facts right of all ways to answer `count` held-out questions, with their errors."""
    return report_facts(measure(large, (small,), 1, questions=count))


def make_models(large: str, small: str) -> DocumentModels:
    """Load both models."""
    first, other = make_formatter(large), make_formatter(small)
    return DocumentModels(first, other, TowerAlignment(other.model, other.processor))


def make_formatter(name: str) -> LanguageFormatter:
    """Load a model that answers from documents, in float32."""
    settings = LanguageSettings(max_new_tokens=_MAX_NEW_TOKENS)
    return LanguageFormatter(name, load(name, dtype=torch.float32), settings)


def answer_all(
    models: DocumentModels,
    asked: Sequence[DocumentQuestion],
    seed: int,
    progress: Progress = silent,
) -> dict[str, list[RunResult]]:
    """Answer all questions in all ways; every selection is of the same drafts."""
    small = "small model, all documents"
    found: dict[str, list[RunResult]] = {name: [] for name in (PLAIN, *_RULES, small)}
    for at, one in enumerate(asked):
        request = {"asked": one}
        found[PLAIN].append(DirectAnswer(models.large).run(request, seed))
        found[small].append(DirectAnswer(models.small).run(request, seed))
        drafts = models.speculate(one).drafts
        scores = [(draft.reliability, draft.alignment) for draft in drafts]
        reliability, alignment = torch.tensor(scores, dtype=torch.float64).unbind(1)
        for name, rule in _RULES.items():
            found[name].append(wrap_answer(drafts[rule(reliability, alignment, seed + at)].answer))
        progress("judge", at + 1, len(asked))
    return found


def read_clip(asked: DocumentQuestion) -> clips.VideoClip:
    """The clip of a question, all of its frames."""
    frames = asked.example.frames
    return clips.read(frames, frames=len(frames))
