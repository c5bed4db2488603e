"""Teach a DREAM head what its target says, and what its middle should be on the way."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.models.heads.dream import DreamHead, DreamHeadConfig
from mmspec.targets.readers.attention_entropy import NarrowStatesHook
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import Lesson, check_continues, read_lesson, shaken, told_to
from mmspec.training.losses import mean_divergence
from mmspec.training.trainable import HeadTraining


def dream_loss(
    reader: Reader,
    head: DreamHead,
    lesson: Lesson,
    noise: float = 0.1,
    state_weight: float = 0.2,
    distribution_weight: float = 1.0,
    middle_weight: float = 1.0,
) -> Tensor:  # ()
    """Smooth L1 of the states, divergence of the distributions, and smooth L1 of the middle.

    Hu et al. 2025. The middle, what the cross-attention gives, is to be the state that enters the
    early layer of least attention entropy, chosen for each token. The divergence is a mean over the
    vocabulary, as in the release, which makes it small. States that go in carry uniform noise of
    +-`noise`.
    """
    narrow = NarrowStatesHook(reader)
    read = read_lesson(reader, lesson, *told_to(head, reader), narrow)
    prompt, length = head_prompt(head, reader, shaken(read.prompt, noise)), read.next.shape[1]
    mask = prompt.seen if any(prompt.pads) else None
    middle, own = (
        states[:, -length:][read.real]
        for states in head.with_middle(
            prompt.embeds, prompt.states, mask, prompt.positions, marks=prompt.marks
        )
    )
    wanted = read.next[read.real]
    loss = state_weight * functional.smooth_l1_loss(own, wanted)
    loss = loss + distribution_weight * mean_divergence(reader.head(own), reader.head(wanted))
    early = narrow.offer(length)[read.real]
    return loss + middle_weight * functional.smooth_l1_loss(middle, early)


def new_dream_head(target: Reader, counts: Tensor, **changes: Any) -> DreamHead:
    """An untrained head for a target, which reads half of a picture's slots if not said."""
    settings = {"visual_keep": 0.5, **changes}
    return DreamHead(DreamHeadConfig.of(target.config, target.vocabulary, **settings))


DREAM = HeadTraining(new_dream_head, dream_loss, check_continues, rate=5e-5)
