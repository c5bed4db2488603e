"""Speculative Verdict: small models answer, those that agree explain, the large one decides.

    judge, *small = (LanguageFormatter(name, load(name), LanguageSettings()) for name in names)
    found = speculative_verdict(small, judge, "How many are red?", picture)

SV (ICLR 2026). No token is speculated on, so this is no recipe: whole answers are drafts, and the
large model writes its own behind them. Lossy: what comes out is not what the large model would say
by itself, and nothing is promised but what a measurement of the task's accuracy shows; nothing is
saved in time either, as every answer is read by every small model. The wording of the prompts is
reconstructed. What the judge writes may be sped up by any recipe (`recipe=`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.draft import Draft, Kind
from mmspec.modalities.common import formatting
from mmspec.targets.memory import block
from mmspec.targets.readers.reader import Reader

REASON = "{question}\nThink step by step, then give the final answer."
JUDGE = (
    "{question}\nSeveral assistants looked at this. Their reasoning may be wrong.\n\n{blocks}\n\n"
    "Decide what is right, and end with the final answer as \\boxed{{answer}}."
)
BLOCK = "Assistant {number}: {reasoning}"


@dataclass(frozen=True)
class ConsensusVerdict:
    """What was decided, and on what grounds; None = a model that said nothing."""

    answer: str  # inside the last box, or all of the text where there is none
    is_boxed: bool
    text: str
    answers: tuple[str | None, ...]  # of every small model
    scores: tuple[float, ...]  # theirs, lower = nearer to the others; nan without an answer
    chosen: tuple[int, ...]  # which small models explained, best first
    reasonings: tuple[str, ...]  # theirs
    output: Any  # of the judge's `generate`


def speculative_verdict(
    drafters: Sequence[Any],
    judge: Any,
    question: str,
    image: Any = None,
    keep: int = 3,
    recipe: Any = "plain",
    seed: int = 0,
    **parts: Any,
) -> ConsensusVerdict:
    """Answer a question by consensus of small models and the verdict of a large one.

    `drafters` and `judge` are `LanguageFormatter`s; their settings say how long and how freely they
    answer. Models that read no picture are asked without it. `keep` small models explain, ties
    among them broken by `seed`; `recipe` and `parts` are of the judge. Reads len(drafters)^2
    prompts. Raises ValueError for fewer than two drafters, or answers.
    """
    if len(drafters) < 2 or keep < 1:
        raise ValueError(
            f"{len(drafters)} small models of which keep={keep} explain can agree on nothing; give "
            "two or more, and keep=1 or more"
        )
    said = [_said(one, accelerate(one.model, "plain"), question, image)[0] for one in drafters]
    answers = tuple(text or None for text in said)
    scores = consensus(_perplexities(drafters, answers, question, image))
    chosen = nearest(scores, keep, seed)
    if not chosen:
        raise ValueError(
            "fewer than two small models said anything, so none agrees with another; give others, "
            "or another question"
        )
    explain = REASON.format(question=question)
    reasonings = tuple(
        _said(drafters[at], accelerate(drafters[at].model, "plain"), explain, image)[0]
        for at in chosen
    )
    blocks = "\n\n".join(
        BLOCK.format(number=number, reasoning=text) for number, text in enumerate(reasonings, 1)
    )
    prompt = JUDGE.format(question=question, blocks=blocks)
    text, output = _said(judge, accelerate(judge.model, recipe, **parts), prompt, image)
    answer = boxed(text)
    found = (answers, tuple(scores.tolist()), chosen, reasonings, output)
    return ConsensusVerdict(text if answer is None else answer, answer is not None, text, *found)


def consensus(log_perplexity: Tensor) -> Tensor:  # (n, n) float -> (n,)
    """How far each answer is from the others: sum over B of |log PPL_B(y_A) - log PPL_B(y_B)|.

    Row B, column A is what model B makes of the answer of A; nan where there is none. Such pairs
    are left out of the sums, and do not count as agreement; an answer that is compared with none
    has no score (nan).
    """
    gap = (log_perplexity - log_perplexity.diagonal()[:, None]).abs()
    gap.fill_diagonal_(torch.nan)
    score = gap.nansum(0)
    return torch.where(gap.isnan().all(0), torch.nan, score)


def nearest(scores: Tensor, count: int, seed: int = 0) -> tuple[int, ...]:  # (n,)
    """The `count` answers of the lowest scores, best first; ties in an order drawn from `seed`.

    Without any score, as where a single model answered, there is nothing to choose by: none.
    """
    drawn = np.random.default_rng(seed).permutation(len(scores)).tolist()
    order = sorted(range(len(scores)), key=lambda at: (round(float(scores[at]), 9), drawn[at]))
    return tuple(at for at in order if not math.isnan(float(scores[at])))[:count]


@torch.no_grad()
def log_perplexity(reader: Reader, inputs: Mapping[str, Any], tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood (nats a token) of an answer behind a prompt of one row.

    Its exponential is the perplexity. Temperature and other settings do not count.
    """
    memory, first, _ = reader.prefill(inputs, room=len(tokens))
    ids = torch.tensor([list(tokens)], device=reader.device)
    behind = block([list(tokens[:1])], Draft.chain(ids[:, 1:], Kind.DET), memory.like)
    logits, _ = reader.read(memory, behind)
    distribution = torch.cat((first[:, None], logits[:, :-1]), 1).double().log_softmax(-1)
    return -float(distribution.gather(-1, ids[..., None]).mean())


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} of a text that is closed, if there is one."""
    for found in reversed([*re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for at in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[found.end() : at].strip()
    return None


def _perplexities(
    drafters: Sequence[Any], answers: Sequence[str | None], question: str, image: Any
) -> Tensor:  # (n, n)
    """What every model makes of every answer, in tokens of its own."""
    found = torch.full((len(drafters), len(drafters)), torch.nan, dtype=torch.float64)
    for row, formatter in enumerate(drafters):
        reader = accelerate(formatter.model, "plain").session.bound.backbone
        words = formatting.tokenizer(formatter.processor)
        inputs = {
            n: v
            for n, v in _asked(formatter, question, image).items()
            if n not in formatter.sampling
        }
        for column, answer in enumerate(answers):
            tokens = [] if answer is None else words(answer, add_special_tokens=False).input_ids
            if tokens:
                found[row, column] = log_perplexity(reader, inputs, tokens)
    return found


def _asked(formatter: Any, prompt: str, image: Any) -> dict[str, Any]:
    shown = None if image is None or not formatter.sees else [image]
    request: dict[str, Any] = formatter.request([prompt], images=shown)
    return request


def _said(formatter: Any, fast: Any, prompt: str, image: Any) -> tuple[str, Any]:
    """What a model answers, and the whole output."""
    output = fast.generate(**_asked(formatter, prompt, image))
    return formatter.text(output), output
