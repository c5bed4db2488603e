"""Train multi-token heads to predict the tokens after the next one.

reader = accelerate(model, "plain").backbone           # the target, frozen
heads = MultiTokenHeads(MultiTokenHeadsConfig.of(reader.config, reader.vocabulary, num_heads=4))
learn(MULTI_TOKEN, reader, heads, examples, steps=2000, rate=1e-3)
heads.save_pretrained(folder)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.target_heads import check_heads
from mmspec.models.heads.multi_token import MultiTokenHeads, MultiTokenHeadsConfig
from mmspec.models.heads.token_heads import TokenHeads
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_pairs
from mmspec.training.trainable import HeadTraining


def heads_loss(
    reader: Reader, heads: TokenHeads, example: TrainingExample, discount: float = 0.8
) -> Tensor:  # ()
    """Cross entropy of head h against token t + 1 + h, times `discount`^h, in sum over heads.

    Medusa-1 (Cai et al. 2024, eq. 1); Nguyen et al. 2025 for codes.
    """
    length = example.tokens.shape[1]
    states = read_pairs(reader, example).states[
        :, -length:
    ]  # the target predicts token t from state t
    tokens = example.tokens.repeat(len(states) // len(example.tokens), 1)
    predicted = heads.logits(states, reader.head)  # (R, T, H, V)
    total = torch.zeros((), device=states.device)
    for head in range(min(heads.reach, length - 1)):
        ahead = head + 1
        logits, labels = predicted[:, :-ahead, head].float(), tokens[:, ahead:]
        known = labels >= 0
        if bool(known.any()):
            loss = functional.cross_entropy(logits[known], labels[known])
            total = total + discount**ahead * loss
    return total


def new_heads(target: Reader, counts: Tensor, **changes: Any) -> MultiTokenHeads:
    """Make untrained heads for a target."""
    return MultiTokenHeads(MultiTokenHeadsConfig.of(target.config, target.vocabulary, **changes))


MULTI_TOKEN = HeadTraining(
    new_heads,
    heads_loss,
    check_heads,
    rate=1e-3,
    warm=None,
    floor=0.01,
    betas=(0.9, 0.98),
    clip=1.0,
)
