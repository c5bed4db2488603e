"""Teach heads that say tokens further ahead: Medusa's, which hear nothing, and Hydra's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.drafters.neural.target_states import check_heads
from mmspec.models.heads.hydra import HydraHeads, HydraHeadsConfig
from mmspec.models.heads.medusa import MedusaHeads, MedusaHeadsConfig
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import Lesson, read_lesson
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.multi_token import heads_loss
from mmspec.training.trainable import HeadTraining


def hydra_loss(
    reader: Reader, heads: HydraHeads, lesson: Lesson, teacher: float = 0.0
) -> Tensor:  # ()
    """Cross entropy of head i against token t + 2 + i, in sum over heads.

    `teacher` of it is against the target's own distribution in the place of the token (Hydra++: 1).
    """
    read = read_lesson(reader, lesson, "hidden")
    length = lesson.tokens.shape[1]
    prefix = _prefix(heads, read.prompt.features[:, :-1], read.prompt.padding)[:, -length:]
    tokens = lesson.tokens.repeat(len(prefix) // len(lesson.tokens), 1)
    embeds, distributions = reader.embed(tokens.clamp_min(0)), reader.head(read.next)
    total = torch.zeros((), device=prefix.device)
    for head in range(min(heads.reach, length - 1)):
        count = length - 1 - head  # places whose token lies in the lesson
        heard = torch.stack([embeds[:, at : at + count] for at in range(head + 1)], 2)
        wanted = tokens[:, head + 1 :]
        known = wanted >= 0
        if not bool(known.any()):
            continue
        said = heads(prefix[:, :count], heard)[known]
        distribution = distributions[:, head : head + count][known]
        hard = functional.cross_entropy(said.float(), wanted[known])
        total = total + (1 - teacher) * hard + teacher * soft_cross_entropy(said, distribution)
    return total


def _prefix(heads: HydraHeads, states: Tensor, padding: Any) -> Tensor:  # (R, n, D)
    slots = torch.arange(states.shape[1], device=states.device)
    start = torch.tensor(list(padding), device=states.device)[:, None]
    mask = slots >= start if any(padding) else None
    return heads.prefix(states, mask, (slots - start).clamp_min(0))


@torch.no_grad()
def output_matrix(target: Reader) -> Tensor:  # (V, D)
    """The target's output head as a matrix; a bias of it is left out."""
    if isinstance(target.head, nn.Linear):
        return target.head.weight.detach()
    width = int(target.config.hidden_size)
    one = torch.eye(width, device=target.device, dtype=target.model.dtype)
    rows: Tensor = target.head(one) - target.head(torch.zeros_like(one))
    return rows.T


def new_medusa(target: Reader, counts: Tensor, **changes: Any) -> MedusaHeads:
    """Untrained heads, which say what the target says of the next token."""
    heads = MedusaHeads(MedusaHeadsConfig.of(target.config, target.vocabulary, **changes))
    heads.copy_output(output_matrix(target))
    return heads


def new_hydra(target: Reader, counts: Tensor, **changes: Any) -> HydraHeads:
    """Untrained heads, which begin as Medusa's: no token is heard."""
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
