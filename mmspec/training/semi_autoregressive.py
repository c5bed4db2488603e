"""Train a head that predicts the states of a block of tokens at once (SpecFLASH)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.models.heads.semi_autoregressive import (
    SemiAutoregressiveHead,
    SemiAutoregressiveHeadConfig,
)
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    TrainingExample,
    check_continues,
    gather_slots,
    read_with_noise,
    run_on_prompt,
)
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining


def block_loss(
    reader: Reader,
    head: SemiAutoregressiveHead,
    example: TrainingExample,
    noise: float = 0.1,
    weight: float = 0.1,
) -> Tensor:  # ()
    """EAGLE's loss of the states of all tokens of a block, in mean over the block.

    Wang et al. 2025: smooth L1 of the states and `weight` times the cross entropy against the
    target's distribution; state i of slot t is that of token t + 1 + i. Input states have uniform
    noise of +-`noise`. Tokens after the end of a response are left out.
    """
    read, prompt = read_with_noise(reader, head, example, noise)
    length = read.next.shape[1]
    hidden = gather_slots(run_on_prompt(head, prompt), prompt.response_slots(length))
    blocks, distributions = head.predict_block(hidden), reader.head(read.next)
    total = torch.zeros((), device=hidden.device)
    for late in range(min(head.config.block, read.longest_response)):
        real = read.is_followed(read.real, late)
        if not bool(real.any()):
            continue
        own, labels = blocks[:, : length - late, late][real], read.next[:, late:][real]
        loss = soft_cross_entropy(reader.head(own), distributions[:, late:][real])
        total = total + functional.smooth_l1_loss(own, labels) + weight * loss
    return total / head.config.block


def new_block_head(target: Reader, counts: Tensor, **changes: Any) -> SemiAutoregressiveHead:
    """Make an untrained head for a target."""
    config = SemiAutoregressiveHeadConfig.of(target.config, target.vocabulary, **changes)
    return SemiAutoregressiveHead(config)


SPECFLASH = HeadTraining(new_block_head, block_loss, check_continues, rate=3e-5, is_packable=True)
