"""Teach a head and its gate what the target says, as it says it (SpecVLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.elastic_gate import BRANCHES
from mmspec.drafters.neural.elastic_head import ElasticHead, ElasticHeadConfig
from mmspec.drafters.neural.head_prompt import head_prompt, question_of
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    Lesson,
    ReadLesson,
    check_continues,
    read_lesson,
    shaken,
    through_prompt,
    told_to,
)
from mmspec.training.trainable import HeadTraining


@dataclass(frozen=True)
class BranchCosts:
    """What each of N branches costs in each row of a lesson; N is 1 where there is no picture."""

    losses: Tensor  # (N, R) of what is drafted
    slots: Tensor  # (N, R) share of the lesson's slots that the head reads


def elastic_loss(
    reader: Reader,
    head: ElasticHead,
    lesson: Lesson,
    noise: float = 0.1,
    weight: float = 0.1,
    temperature: float = 1.0,
    price: float = 0.05,
) -> Tensor:  # ()
    """Smooth L1 of the states and `weight` cross entropy, weighed over branches by the gate.

    Huang et al. 2025: teacher states and distributions are made as they are needed. Every branch
    drafts the lesson, and what they cost is weighed by Gumbel-softmax samples of the gate at
    `temperature`, 0 being one sampled branch. Reconstructed: all numbers; branches are weighed by
    their losses, not by what they give; a slot costs `price` times its share, without which no
    picture is thinned.
    """
    read = read_lesson(reader, lesson, *told_to(head, reader))
    found = branch_costs(reader, head, read, noise, weight)
    costs = found.losses + price * found.slots
    if len(costs) == 1:
        return costs.mean()
    chosen = sampled(gate_logits(reader, head, read), temperature)
    return (chosen.T * costs).sum(0).mean()


def branch_costs(
    reader: Reader, head: ElasticHead, read: ReadLesson, noise: float, weight: float
) -> BranchCosts:
    """What every branch costs; the same noise for all."""
    prompt, length = shaken(read.prompt, noise), read.next.shape[1]
    ids = prompt.tokens
    has_pictures = ids is not None and bool(
        torch.isin(ids, ids.new_tensor(reader.placeholder_ids)).any()
    )
    distributions = reader.head(read.next).float().softmax(-1)
    counts = read.real.sum(-1).clamp_min(1)
    losses, slots = [], []
    for branch in BRANCHES if has_pictures else BRANCHES[:1]:
        laid = head_prompt(head.forced(branch), reader, prompt)
        own = through_prompt(head, laid)[:, -length:]
        gap = functional.smooth_l1_loss(own, read.next, reduction="none").mean(-1)
        spoken = (distributions * reader.head(own).float().log_softmax(-1)).sum(-1)
        each = (gap - weight * spoken).masked_fill(~read.real, 0.0)
        losses.append(each.sum(-1) / counts)
        slots.append(laid.seen.sum(-1) / prompt.embeds.shape[1])
    return BranchCosts(torch.stack(losses), torch.stack(slots))


def gate_logits(reader: Reader, head: ElasticHead, read: ReadLesson) -> Tensor:  # (R, 5)
    """What the gate says of the question of every row."""
    rows = range(len(read.next))
    return torch.stack([head.gate.logits(question_of(reader, read.prompt, row)) for row in rows])


def sampled(logits: Tensor, temperature: float) -> Tensor:  # (R, N) -> (R, N)
    """Gumbel-softmax samples; one-hot at temperature 0, from torch's own generator."""
    noise = -torch.empty_like(logits).exponential_().log()
    scores = (logits + noise).float()
    if temperature == 0:
        return functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)
    return (scores / temperature).softmax(-1)


def new_elastic_head(target: Reader, counts: Tensor, **changes: Any) -> ElasticHead:
    """An untrained head and gate for a target."""
    return ElasticHead(ElasticHeadConfig.of(target.config, target.vocabulary, **changes))


SPECVLM = HeadTraining(new_elastic_head, elastic_loss, check_continues, rate=1e-4)
