"""Train a codec language model and its multi-token heads together (Nguyen et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from mmspec.models.heads.multi_token import MultiTokenHeads
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, split_parameters
from tools.zoo.speech.synthesis.language_model_training import IGNORED, SpeechBatch


def train_jointly(
    model: LlamaForCausalLM,
    heads: MultiTokenHeads,
    examples: Iterator[SpeechBatch],
    schedule: CosineDecay,
    run: TrainingRun,
    discount: float = 0.8,
) -> None:
    """Minimise the cross entropy of the next code and, times `discount`^h, of that of head h."""
    parts: Any = model
    model.train()
    heads.train()
    matrices, others = split_parameters(
        parts.model.layers, [*model.parameters(), *heads.parameters()]
    )

    def loss_of(batch: SpeechBatch) -> Tensor:
        losses = multi_token_losses(model, heads, batch)
        return torch.stack([discount**ahead * one for ahead, one in enumerate(losses)]).sum()

    fit(others, examples, loss_of, schedule, "codes ahead", run, matrices)
    model.train(False)
    heads.train(False)


def multi_token_losses(
    model: LlamaForCausalLM, heads: MultiTokenHeads, batch: SpeechBatch
) -> list[Tensor]:
    """Cross entropies of the next code, and of those that the heads predict."""
    parts: Any = model
    states = parts.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    predicted = [states, *heads(states).unbind(-2)]
    losses = []
    for ahead, one in enumerate(predicted):
        labels = batch.labels[:, 1 + ahead :]
        known = labels != IGNORED
        logits = model.lm_head(one[:, : labels.shape[1]][known])
        losses.append(functional.cross_entropy(logits.float(), labels[known]))
    return losses
