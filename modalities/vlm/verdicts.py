"""Accuracy and time of Speculative Verdict on questions about the Scene world.

Three bundled models answer held-out questions, and a judge that was trained to read such answers
(`zoo:llava-chat-verdict`) answers after them: with the most consistent ones, or with random ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.bench.answers import measure_answers, report_facts, wrap_answer
from mmspec.bench.compare import PLAIN, Comparison
from mmspec.bench.reporting import Progress, silent
from mmspec.modalities.common.formatting import get_tokenizer
from mmspec.modalities.vlm import LanguageSettings
from mmspec.modalities.vlm.consensus import (
    VerdictPrompts,
    compare_answers,
    consensus,
    generate_answer,
    select_nearest,
)
from mmspec.modalities.vlm.formatting import LanguageFormatter
from mmspec.modalities.vlm.plug import load
from mmspec.modality import Runner, RunResult
from mmspec.registry import ZOO
from mmspec.zoo.facts import read_fact
from mmspec.zoo.language import Example, examples, score

SMALL = ("zoo:llava", "zoo:qwen2.5-vl", "zoo:llava-drafter")
BASE = "zoo:llava-chat"  # what the judge was trained from
PROMPTS = VerdictPrompts(  # of words that the bundled models know
    reason=None,  # their answers say what they saw before they conclude
    judge="{question} others looked at this picture. {blocks} check them and answer.",
    block="somebody wrote: {reasoning}",
    separator=" ",
)
QUESTIONS = 120
_BATCH = 60  # questions that are answered together for the accuracy; timed ones are alone
_MAX_NEW_TOKENS = 96
_SEED = 7  # of the questions, added to that of the measurement


@dataclass(frozen=True)
class Choice:
    """Whose answers the judge reads: `count` of the small models', by consensus or at random."""

    name: str
    count: int
    by_consensus: bool = False

    def select(self, scores: Tensor | None, models: int, seed: int) -> tuple[int, ...]:
        """Numbers of the small models, given the scores of their answers (models,)."""
        if self.by_consensus:
            assert scores is not None
            return select_nearest(scores, self.count, seed)
        order: list[int] = np.random.default_rng((seed, 16)).permutation(models).tolist()
        return tuple(order[: self.count])


CHOICES = (
    Choice(PLAIN, 0),
    Choice("SV", 3, by_consensus=True),
    Choice("SV, keep=2", 2, by_consensus=True),
    Choice("SV, 2 at random", 2),
)
MAJORITY = "majority, of the small models"


@dataclass(frozen=True)
class Panel:
    """The judge and the small models, as formatters."""

    judge: Any
    small: Sequence[Any]

    def score(self, example: Example, texts: Sequence[str]) -> Tensor:  # (models,)
        """Scores of the answers of all small models."""
        answers = [text or None for text in texts]
        return consensus(compare_answers(self.small, answers, example.prompt, example.image))

    def write_prompt(self, example: Example, texts: Sequence[str]) -> str:
        """The prompt of the judge: the question alone, or with answers."""
        return PROMPTS.write_judge(example.prompt, texts) if texts else example.prompt


@dataclass(frozen=True)
class Verdict(Runner):
    """One question at a time: the small models answer, then the judge."""

    panel: Panel
    choice: Choice

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        example, models = request["example"], self.panel.small
        chosen: Sequence[int] = range(len(models))
        if not self.choice.by_consensus:
            chosen = self.choice.select(None, len(models), seed)
        texts = {at: generate_answer(models[at], example.prompt, example.image) for at in chosen}
        if self.choice.by_consensus:
            scores = self.panel.score(example, [*texts.values()])
            chosen = self.choice.select(scores, len(models), seed)
        prompt = self.panel.write_prompt(example, [texts[at] for at in chosen])
        return wrap_answer(generate_answer(self.panel.judge, prompt, example.image))


def measure(
    judge: str,
    small: Sequence[str],
    timed: int,
    repeats: int = 1,
    seed: int = 0,
    questions: int = QUESTIONS,
    progress: Progress = silent,
) -> Comparison:
    """Answer `questions` in all ways, and time the judge's on the first `timed`, one at a time.

    Plain is the judge without other answers. Speeds are over it, per answer. Baselines are what the
    judge was trained from, the small models, and their majority.
    """
    asked = examples(max(questions, timed), "held-out", seed + _SEED, kind="question")
    settings = LanguageSettings(max_new_tokens=_MAX_NEW_TOKENS)
    names = judge, BASE, *small
    made = {  # a folder of a path would be run in its own dtype, float16
        name: LanguageFormatter(name, load(name, dtype=torch.float32), settings) for name in names
    }
    panel = Panel(made[judge], [made[name] for name in small])
    runners = {one.name: Verdict(panel, one) for one in CHOICES}
    judged = _answer_all(panel, made[BASE], asked[:questions], seed, progress)

    def facts(results: Sequence[RunResult]) -> list[tuple[int, int]]:
        return [score(one, result.output) for one, result in zip(asked, results, strict=False)]

    requests = [{"example": one} for one in asked[:timed]]
    return measure_answers(judge, "vlm", runners, requests, judged, facts, repeats, seed, progress)


def measure_accuracy(judge: str, count: int) -> dict[str, float]:
    """Shares of facts right of all ways to answer `count` held-out questions, with their errors."""
    report = report_facts(measure(judge, SMALL, 1, questions=count))
    return {
        name.replace(PLAIN, "judge alone").replace(ZOO, ""): value for name, value in report.items()
    }


def vote(example: Example, texts: Sequence[str], seed: int) -> str:
    """A text that states what most of them state; ties are drawn."""
    assert example.facts is not None
    kinds = [kind for kind, _ in example.facts]
    stated = [tuple(read_fact(kind, text) for kind in kinds) for text in texts]
    counts, order = Counter(stated), np.random.default_rng(seed).permutation(len(texts))
    return texts[max(order, key=lambda at: counts[stated[at]])]


def _answer_all(
    panel: Panel, base: Any, asked: Sequence[Example], seed: int, progress: Progress
) -> dict[str, list[RunResult]]:
    """Answer all questions in all ways, several together."""
    done, stages = 0, len(panel.small) + 1 + len(CHOICES)

    def answer(formatter: Any, prompts: Sequence[str]) -> list[str]:
        nonlocal done
        texts = _answer_in_batches(formatter, prompts, asked)
        progress("judge", done := done + 1, stages)
        return texts

    prompts = [one.prompt for one in asked]
    small = [answer(one, prompts) for one in panel.small]
    texts = [*zip(*small, strict=True)]
    scores = [panel.score(one, some) for one, some in zip(asked, texts, strict=True)]
    found = {f"{base.source}, alone": answer(base, prompts)}
    for formatter, own in zip(panel.small, small, strict=True):
        found[f"{formatter.source}, alone"] = own
    found[MAJORITY] = [
        vote(one, some, seed + at) for at, (one, some) in enumerate(zip(asked, texts, strict=True))
    ]
    for choice in CHOICES:
        chosen = [choice.select(one, len(small), seed + at) for at, one in enumerate(scores)]
        found[choice.name] = answer(
            panel.judge,
            [
                panel.write_prompt(one, [some[at] for at in mine])
                for one, some, mine in zip(asked, texts, chosen, strict=True)
            ],
        )
    return {name: [wrap_answer(text) for text in own] for name, own in found.items()}


def _answer_in_batches(
    formatter: Any, prompts: Sequence[str], asked: Sequence[Example]
) -> list[str]:
    fast, found = accelerate(formatter.model, "plain"), list[str]()
    tokenizer = get_tokenizer(formatter.processor)
    for at in range(0, len(prompts), _BATCH):
        images = [one.image for one in asked[at : at + _BATCH]] if formatter.sees else None
        request = formatter.request(prompts[at : at + _BATCH], images=images)
        new = fast.generate(**request).sequences[:, request["input_ids"].shape[1] :]
        found += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return found
