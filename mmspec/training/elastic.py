"""Train a head and its gate on the target's states and distributions (SpecVLM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.elastic_gate import BRANCHES
from mmspec.drafters.neural.elastic_head import ElasticHead, ElasticHeadConfig
from mmspec.drafters.neural.head_prompt import head_prompt, question_embeddings
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    TargetOutputs,
    TrainingExample,
    add_noise,
    check_continues,
    read_example,
    required_inputs,
    run_on_prompt,
)
from mmspec.training.trainable import HeadTraining


@dataclass(frozen=True)
class BranchCosts:
    """Costs of each of N branches in each row of an example; N is 1 without an image."""

    losses: Tensor  # (N, R) of the draft
    slots: Tensor  # (N, R) share of the slots that the head reads


def elastic_loss(
    reader: Reader,
    head: ElasticHead,
    example: TrainingExample,
    noise: float = 0.1,
    weight: float = 0.1,
    temperature: float = 1.0,
    slot_weight: float = 0.05,
) -> Tensor:  # ()
    """Smooth L1 of the states and `weight` cross entropy, weighted over branches by the gate.

    Huang et al. 2025. The target's states and distributions are computed online. Every branch
    drafts the example; branch costs are weighted by Gumbel-softmax samples of the gate at
    `temperature` (0 = one sampled branch). Reconstructed: all constants; losses are weighted
    instead of outputs; the share of read slots costs `slot_weight`, without which images are never
    compressed.
    """
    read = read_example(reader, example, *required_inputs(head, reader))
    found = branch_costs(reader, head, read, noise, weight)
    costs = found.losses + slot_weight * found.slots
    if len(costs) == 1:
        return costs.mean()
    weights = sample_branches(gate_logits(reader, head, read), temperature)
    return (weights.T * costs).sum(0).mean()


def branch_costs(
    reader: Reader, head: ElasticHead, read: TargetOutputs, noise: float, weight: float
) -> BranchCosts:
    """Compute the costs of all branches, with the same noise."""
    prompt, length = add_noise(read.prompt, noise), read.next.shape[1]
    ids = prompt.tokens
    has_pictures = ids is not None and bool(
        torch.isin(ids, ids.new_tensor(reader.placeholder_ids)).any()
    )
    distributions = reader.head(read.next).float().softmax(-1)
    counts = read.real.sum(-1).clamp_min(1)
    losses, slots = [], []
    for branch in BRANCHES if has_pictures else BRANCHES[:1]:
        branch_prompt = head_prompt(head.with_branch(branch), reader, prompt)
        own = run_on_prompt(head, branch_prompt)[:, -length:]
        gap = functional.smooth_l1_loss(own, read.next, reduction="none").mean(-1)
        likelihood = (distributions * reader.head(own).float().log_softmax(-1)).sum(-1)
        per_token = (gap - weight * likelihood).masked_fill(~read.real, 0.0)
        losses.append(per_token.sum(-1) / counts)
        slots.append(branch_prompt.attention_mask.sum(-1) / prompt.embeds.shape[1])
    return BranchCosts(torch.stack(losses), torch.stack(slots))


def gate_logits(reader: Reader, head: ElasticHead, read: TargetOutputs) -> Tensor:  # (R, 5)
    """Logits of the gate for the question of every row."""
    rows = range(len(read.next))
    return torch.stack(
        [head.gate.logits(question_embeddings(reader, read.prompt, row)) for row in rows]
    )


def sample_branches(logits: Tensor, temperature: float) -> Tensor:  # (R, N) -> (R, N)
    """Draw Gumbel-softmax samples from torch's global generator; one-hot at temperature 0."""
    noise = -torch.empty_like(logits).exponential_().log()
    scores = (logits + noise).float()
    if temperature == 0:
        return functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)
    return (scores / temperature).softmax(-1)


def new_elastic_head(target: Reader, counts: Tensor, **changes: Any) -> ElasticHead:
    """Make an untrained head and gate for a target."""
    return ElasticHead(ElasticHeadConfig.of(target.config, target.vocabulary, **changes))


SPECVLM = HeadTraining(new_elastic_head, elastic_loss, check_continues, rate=1e-4)
