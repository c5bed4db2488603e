"""Train Amphista's heads on the target's distributions of the next tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.neural.feature_head import check_head
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.models.heads.amphista import AmphistaHead, AmphistaHeadConfig
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    TrainingExample,
    gather_slots,
    read_example,
    required_inputs,
    run_on_prompt,
)
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining


def amphista_loss(
    reader: Reader, head: AmphistaHead, example: TrainingExample, discount: float = 0.8
) -> Tensor:  # ()
    """Cross entropy of head i against the target's distribution, times `discount`^i, summed.

    Head i of slot t predicts token t + 2 + i; tokens after the end of a response are left out.
    """
    read = read_example(reader, example, *required_inputs(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), read.next.shape[1]
    adapted = gather_slots(run_on_prompt(head, prompt), prompt.response_slots(length))
    blocks, distributions = head.predict_block(adapted), reader.head(read.next)
    total = torch.zeros((), device=adapted.device)
    for late in range(min(head.reach, read.longest_response)):
        real = read.is_followed(read.real, late)
        if bool(real.any()):
            logits = head.logits(blocks[:, : length - late, late][real], reader.head)
            loss = soft_cross_entropy(logits, distributions[:, late:][real])
            total = total + discount**late * loss
    return total


def new_amphista(target: Reader, counts: Tensor, **changes: Any) -> AmphistaHead:
    """Make an untrained head for a target."""
    return AmphistaHead(AmphistaHeadConfig.of(target.config, target.vocabulary, **changes))


AMPHISTA = HeadTraining(new_amphista, amphista_loss, check_head, rate=1e-3, is_packable=True)
