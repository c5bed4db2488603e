"""Train a head with an image adaptor (ViSpec), on text and then on the target's image responses.

Kang et al. 2025. Stage 1, on text: EAGLE's loss and a ranking loss of the target's most likely
tokens. Stage 2, on long responses of the target: losses of distributions only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.models.heads.feature_head import FeatureHead
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    TrainingExample,
    check_continues,
    new_head,
    predict_states,
    read_with_noise,
    run_on_prompt,
)
from mmspec.training.losses import list_mle, soft_cross_entropy, total_variation
from mmspec.training.trainable import HeadTraining


def text_loss(
    reader: Reader,
    head: FeatureHead,
    example: TrainingExample,
    noise: float = 0.1,
    weight: float = 0.1,
) -> Tensor:  # ()
    """Stage 1: smooth L1 + `weight` (cross entropy + 0.1 ListMLE of the 10 most likely tokens)."""
    own, labels = predict_states(reader, head, example, noise)
    logits, target = reader.head(own), reader.head(labels)
    loss = soft_cross_entropy(logits, target) + 0.1 * list_mle(logits, target)
    return functional.smooth_l1_loss(own, labels) + weight * loss


def vispec_loss(
    reader: Reader, head: FeatureHead, example: TrainingExample, noise: float = 0.1, passes: int = 2
) -> Tensor:  # ()
    """Stage 2: 10 x total variation + 0.1 ListMLE, no loss of states, in sum over passes.

    The first pass reads the target's states; each further one reads the outputs of the pass before,
    shifted by one slot, after the target's first state.
    """
    read, prompt = read_with_noise(reader, head, example, noise)
    distribution = reader.head(read.next[read.real])
    total = torch.zeros((), device=distribution.device)
    for _ in range(passes):
        own = run_on_prompt(head, prompt)
        logits = reader.head(own[:, -read.next.shape[1] :][read.real])
        total = (
            total
            + 10 * total_variation(logits, distribution)
            + 0.1 * list_mle(logits, distribution)
        )
        first = prompt.attention_mask.long().cumsum(-1) == 1
        states = torch.where(first[..., None], prompt.states, own.roll(1, 1))
        prompt = replace(prompt, states=states)
    return total


VISPEC = HeadTraining(
    partial(new_head, visual_slots="compressed", num_q=2), vispec_loss, check_continues, rate=3e-6
)
