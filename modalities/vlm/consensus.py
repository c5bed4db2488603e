"""Speculative Verdict: small models answer, the most consistent ones explain, a large one decides.

    judge, *small = (LanguageFormatter(name, load(name), LanguageSettings()) for name in names)
    found = speculative_verdict(small, judge, "How many are red?", picture)

`prompts=` words them for models of other languages, or of few words (`VerdictPrompts`).

SV (ICLR 2026). This is not a recipe: drafts are whole answers, and the large model generates its
answer conditioned on them. Lossy: the output differs from that of the large model alone, so only
the accuracy on a task can be measured; it saves no time, since every small model reads every
answer. The default wording of the prompts is reconstructed. The judge decodes with any recipe
(`recipe=`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.draft import Draft, Kind
from mmspec.modalities.common import formatting
from mmspec.targets.memory import build_block
from mmspec.targets.readers.reader import Reader

_FIELDS = {  # of each template: those that it needs, and those that it may have
    "reason": (("question",), ()),
    "judge": (("question", "blocks"), ()),
    "block": (("reasoning",), ("number",)),
}


@dataclass(frozen=True)
class VerdictPrompts:
    """Templates of `str.format`: a small model's explanation, the judge, and one block of it.

    `{question}` is the question, `{blocks}` the blocks of all selected models, joined by
    `separator`; `{reasoning}` is the explanation of one, `{number}` its number from 1. Without
    `reason` nothing is generated a second time: a block has the model's answer. Raises ValueError
    for a template that lacks a field, or has another one.
    """

    reason: str | None = "{question}\nThink step by step, then give the final answer."
    judge: str = (
        "{question}\nSeveral assistants looked at this. Their reasoning may be wrong.\n\n{blocks}"
        "\n\nDecide what is right, and end with the final answer as \\boxed{{answer}}."
    )
    block: str = "Assistant {number}: {reasoning}"
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        for name, (needed, optional) in _FIELDS.items():
            template = getattr(self, name)
            if not isinstance(template, str) and (name != "reason" or template is not None):
                raise ValueError(f"template {name}={template!r} is no text; give one, or drop it")
            if template is not None:
                _check_fields(name, template, needed, optional)

    def write_judge(self, question: str, reasonings: Sequence[str]) -> str:
        """The prompt of the judge."""
        blocks = (
            self.block.format(number=number, reasoning=text)
            for number, text in enumerate(reasonings, 1)
        )
        return self.judge.format(question=question, blocks=self.separator.join(blocks))


@dataclass(frozen=True)
class ConsensusVerdict:
    """The decision and the answers it is based on; None for an empty answer."""

    answer: str  # inside the last box, or the whole text without a box
    is_boxed: bool
    text: str
    answers: tuple[str | None, ...]  # of every small model
    scores: tuple[float, ...]  # of the answers, lower = more consistent; nan without an answer
    selected: tuple[int, ...]  # small models that explained, best first
    reasonings: tuple[str, ...]  # of the selected models
    output: Any  # of the judge's `generate`


def speculative_verdict(
    drafters: Sequence[Any],
    judge: Any,
    question: str,
    image: Any = None,
    keep: int = 3,
    recipe: Any = "plain",
    seed: int = 0,
    prompts: VerdictPrompts | None = None,
    **parts: Any,
) -> ConsensusVerdict:
    """Answer a question by consensus of small models and the verdict of a large one.

    `drafters` and `judge` are `LanguageFormatter`s with their own generation settings. Text models
    get no image. `keep` small models explain, `seed` breaks ties; `prompts` are the templates;
    `recipe` and `parts` apply to the judge. Prefills len(drafters)^2 prompts. Raises ValueError for
    fewer than two drafters or answers.
    """
    if len(drafters) < 2 or keep < 1:
        raise ValueError(
            f"{len(drafters)} small models with keep={keep} give no consensus; give two or more, "
            "and keep=1 or more"
        )
    prompts = prompts or VerdictPrompts()
    answers = tuple(generate_answer(one, question, image) or None for one in drafters)
    scores = consensus(compare_answers(drafters, answers, question, image))
    selected = select_nearest(scores, keep, seed)
    if not selected:
        raise ValueError(
            "fewer than two small models gave an answer, so there is no consensus; give others, "
            "or another question"
        )
    reasonings = tuple(answers[at] or "" for at in selected)
    if prompts.reason is not None:
        explain = prompts.reason.format(question=question)
        reasonings = tuple(generate_answer(drafters[at], explain, image) for at in selected)
    prompt = prompts.write_judge(question, reasonings)
    text, output = _generate_text(judge, accelerate(judge.model, recipe, **parts), prompt, image)
    answer = extract_boxed(text)
    found = (answers, tuple(scores.tolist()), selected, reasonings, output)
    return ConsensusVerdict(text if answer is None else answer, answer is not None, text, *found)


def generate_answer(formatter: Any, prompt: str, image: Any = None) -> str:
    """The plain answer of a `LanguageFormatter`'s model to one prompt."""
    return _generate_text(formatter, accelerate(formatter.model, "plain"), prompt, image)[0]


def consensus(log_perplexity: Tensor) -> Tensor:  # (n, n) float -> (n,)
    """Distance of each answer to the others: sum over B of |log PPL_B(y_A) - log PPL_B(y_B)|.

    Row B, column A is log PPL of model B for the answer of model A; nan without an answer. Such
    pairs are left out of the sums; an answer without any pair has score nan.
    """
    gap = (log_perplexity - log_perplexity.diagonal()[:, None]).abs()
    gap.fill_diagonal_(torch.nan)
    score = gap.nansum(0)
    return torch.where(gap.isnan().all(0), torch.nan, score)


def select_nearest(scores: Tensor, count: int, seed: int = 0) -> tuple[int, ...]:  # (n,)
    """Return the `count` answers with the lowest scores, best first; `seed` breaks ties.

    Answers with score nan are not selected.
    """
    ranks = np.random.default_rng(seed).permutation(len(scores)).tolist()
    order = sorted(range(len(scores)), key=lambda at: (round(float(scores[at]), 9), ranks[at]))
    return tuple(at for at in order if not math.isnan(float(scores[at])))[:count]


@torch.no_grad()
def log_perplexity(reader: Reader, inputs: Mapping[str, Any], tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood (nats per token) of an answer, given a prompt of one row.

    Its exponential is the perplexity. Temperature and other settings are ignored.
    """
    memory, first, _ = reader.prefill(inputs, extra_slots=len(tokens))
    ids = torch.tensor([list(tokens)], device=reader.device)
    suffix = build_block([list(tokens[:1])], Draft.chain(ids[:, 1:], Kind.DET), memory.like)
    logits, _ = reader.read(memory, suffix)
    distribution = torch.cat((first[:, None], logits[:, :-1]), 1).double().log_softmax(-1)
    return -float(distribution.gather(-1, ids[..., None]).mean())


def extract_boxed(text: str) -> str | None:
    """Return the content of the last closed \\boxed{...} of a text; None without one."""
    for found in reversed([*re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for at in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[found.end() : at].strip()
    return None


def compare_answers(
    drafters: Sequence[Any], answers: Sequence[str | None], question: str, image: Any = None
) -> Tensor:  # (n, n)
    """Log PPL of every model (row) for every answer (column); nan for an empty answer."""
    found = torch.full((len(drafters), len(drafters)), torch.nan, dtype=torch.float64)
    for row, formatter in enumerate(drafters):
        reader = accelerate(formatter.model, "plain").session.bound.backbone
        tokenizer = formatting.get_tokenizer(formatter.processor)
        inputs = {
            n: v
            for n, v in _make_request(formatter, question, image).items()
            if n not in formatter.sampling
        }
        for column, answer in enumerate(answers):
            tokens = [] if answer is None else tokenizer(answer, add_special_tokens=False).input_ids
            if tokens:
                found[row, column] = log_perplexity(reader, inputs, tokens)
    return found


def _make_request(formatter: Any, prompt: str, image: Any) -> dict[str, Any]:
    images = None if image is None or not formatter.sees else [image]
    request: dict[str, Any] = formatter.request([prompt], images=images)
    return request


def _generate_text(formatter: Any, fast: Any, prompt: str, image: Any) -> tuple[str, Any]:
    """Generate an answer; returns its text and the whole output."""
    output = fast.generate(**_make_request(formatter, prompt, image))
    return formatter.text(output), output


def _check_fields(name: str, template: str, needed: Sequence[str], optional: Sequence[str]) -> None:
    try:
        found = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise ValueError(
            f"template {name}={template!r} is not one of str.format ({error}); double the braces "
            "that are text"
        ) from None
    missing = [one for one in needed if one not in found]
    unknown = sorted(found - {*needed, *optional})
    if missing or unknown:
        wrong = f"lacks {{{missing[0]}}}" if missing else f"has {{{unknown[0]}}}"
        known = ", ".join(f"{{{one}}}" for one in (*needed, *optional))
        raise ValueError(
            f"template {name}={template!r} {wrong}; its fields are {known} (double the braces that "
            "are text)"
        )
