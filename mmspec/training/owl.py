"""Train OWL's LSTM on the target's distributions of the next tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.neural.target_heads import check_heads
from mmspec.models.heads.owl import OwlHead, OwlHeadConfig
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining


def owl_loss(
    reader: Reader, head: OwlHead, example: TrainingExample, steps: int = 6, discount: float = 0.9
) -> Tensor:  # ()
    """Cross entropy of step i against the target's distribution, times `discount`^i, summed.

    From the state before response token t, step i reads tokens t .. t + i of the response and
    predicts token t + i + 1; tokens after the end of a response are left out.
    """
    read = read_example(reader, example, "hidden")
    length = read.next.shape[1]
    tokens = example.tokens.repeat(len(read.next) // len(example.tokens), 1)
    states = read.prompt.features[:, -length - 1 : -1].flatten(0, 1)
    embeds, distributions = reader.embed(tokens.clamp_min(0)), reader.head(read.next)
    memory, total = head.begin(states), torch.zeros((), device=states.device)
    for step in range(min(steps, length)):
        inputs = torch.nn.functional.pad(embeds[:, step:], (0, 0, 0, step))
        own, memory = head(inputs.flatten(0, 1)[:, None], memory)
        real = read.real[:, step:]
        if bool(real.any()):
            own = own[:, 0].unflatten(0, read.real.shape)[:, : length - step]
            loss = soft_cross_entropy(reader.head(own[real]), distributions[:, step:][real])
            total = total + discount**step * loss
    return total


def new_owl(target: Reader, counts: Tensor, **changes: Any) -> OwlHead:
    """Make an untrained head for a target."""
    return OwlHead(OwlHeadConfig.of(target.config, target.vocabulary, **changes))


OWL = HeadTraining(new_owl, owl_loss, check_heads, rate=1e-3)
