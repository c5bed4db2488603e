"""Train a DREAM head on the target's states, distributions and intermediate states."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.models.heads.dream import DreamHead, DreamHeadConfig
from mmspec.targets.readers.attention_entropy import NarrowStatesHook
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    TrainingExample,
    add_noise,
    check_continues,
    read_example,
    required_inputs,
)
from mmspec.training.losses import mean_divergence
from mmspec.training.trainable import HeadTraining


def dream_loss(
    reader: Reader,
    head: DreamHead,
    example: TrainingExample,
    noise: float = 0.1,
    state_weight: float = 0.2,
    distribution_weight: float = 1.0,
    middle_weight: float = 1.0,
) -> Tensor:  # ()
    """Smooth L1 of the states, divergence of the distributions, and smooth L1 of the middle.

    Hu et al. 2025. The label of the middle (the output of the cross-attention) is the input of the
    early layer with the least attention entropy, selected per token. The divergence is a mean over
    the vocabulary, as in the release, which makes it small. Input states have uniform noise of
    +-`noise`.
    """
    narrow = NarrowStatesHook(reader)
    read = read_example(reader, example, *required_inputs(head, reader), narrow)
    prompt, length = head_prompt(head, reader, add_noise(read.prompt, noise)), read.next.shape[1]
    mask = prompt.attention_mask if any(prompt.pads) else None
    middle, own = (
        states[:, -length:][read.real]
        for states in head.forward_with_middle(
            prompt.embeds, prompt.states, mask, prompt.positions, marks=prompt.marks
        )
    )
    labels = read.next[read.real]
    loss = state_weight * functional.smooth_l1_loss(own, labels)
    loss = loss + distribution_weight * mean_divergence(reader.head(own), reader.head(labels))
    early = narrow.offer(length)[read.real]
    return loss + middle_weight * functional.smooth_l1_loss(middle, early)


def new_dream_head(target: Reader, counts: Tensor, **changes: Any) -> DreamHead:
    """Make an untrained head for a target; default: it reads half of an image's slots."""
    settings = {"visual_keep": 0.5, **changes}
    return DreamHead(DreamHeadConfig.of(target.config, target.vocabulary, **settings))


DREAM = HeadTraining(new_dream_head, dream_loss, check_continues, rate=5e-5)
