"""Train Medusa's independent heads and Hydra's sequentially dependent heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.neural.target_heads import check_heads
from mmspec.models.heads.hydra import HydraHeads, HydraHeadsConfig
from mmspec.models.heads.medusa import MedusaHeads, MedusaHeadsConfig
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.multi_token import heads_loss
from mmspec.training.sharding import whole_weight
from mmspec.training.trainable import HeadTraining


def hydra_loss(
    reader: Reader, heads: HydraHeads, example: TrainingExample, teacher: float = 0.0
) -> Tensor:  # ()
    """Cross entropy of head i against token t + 2 + i, in sum over heads.

    A share `teacher` is against the target's distribution instead of the token (Hydra++: 1).
    """
    read = read_example(reader, example, "hidden")
    length = example.tokens.shape[1]
    prefix = _prefix(heads, read.prompt.features[:, :-1], read.prompt.padding)[:, -length:]
    tokens = example.tokens.repeat(len(prefix) // len(example.tokens), 1)
    embeds, distributions = reader.embed(tokens.clamp_min(0)), reader.head(read.next)
    total = torch.zeros((), device=prefix.device)
    for head in range(min(heads.reach, length - 1)):
        count = length - 1 - head  # positions whose token is in the example
        inputs = torch.stack([embeds[:, at : at + count] for at in range(head + 1)], 2)
        labels = tokens[:, head + 1 :]
        known = labels >= 0
        if not bool(known.any()):
            continue
        logits = heads(prefix[:, :count], inputs)[known]
        distribution = distributions[:, head : head + count][known]
        hard = functional.cross_entropy(logits.float(), labels[known])
        total = total + (1 - teacher) * hard + teacher * soft_cross_entropy(logits, distribution)
    return total


def _prefix(heads: HydraHeads, states: Tensor, padding: Any) -> Tensor:  # (R, n, D)
    slots = torch.arange(states.shape[1], device=states.device)
    start = torch.tensor(list(padding), device=states.device)[:, None]
    mask = slots >= start if any(padding) else None
    return heads.prefix(states, mask, (slots - start).clamp_min(0))


@torch.no_grad()
def output_matrix(target: Reader) -> Tensor:  # (V, D)
    """Return the target's output head as a matrix, without bias."""
    if isinstance(target.head, nn.Linear):
        return whole_weight(target.model, target.head.weight).detach()
    width = int(target.config.hidden_size)
    one = torch.eye(width, device=target.device, dtype=target.model.dtype)
    rows: Tensor = target.head(one) - target.head(torch.zeros_like(one))
    return rows.T


def new_medusa(target: Reader, counts: Tensor, **changes: Any) -> MedusaHeads:
    """Make untrained heads, which repeat the target's prediction of the next token."""
    heads = MedusaHeads(MedusaHeadsConfig.of(target.config, target.vocabulary, **changes))
    heads.copy_output(output_matrix(target))
    return heads


def new_hydra(target: Reader, counts: Tensor, **changes: Any) -> HydraHeads:
    """Make untrained heads, initialised like Medusa's: they ignore draft tokens."""
    heads = HydraHeads(HydraHeadsConfig.of(target.config, target.vocabulary, **changes))
    heads.copy_output(output_matrix(target))
    return heads


MEDUSA = HeadTraining(new_medusa, heads_loss, check_heads, rate=1e-3, warm=None, floor=0.01)
HYDRA = HeadTraining(new_hydra, hydra_loss, check_heads, rate=1e-3)
HYDRA_PP = HeadTraining(
    partial(new_hydra, hydra_head_arch="prefix-mlp", hydra_num_layers=4, dropout_rate=0.2),
    partial(hydra_loss, teacher=1.0),
    check_heads,
    rate=5e-4,
)
