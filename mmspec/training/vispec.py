"""Teach a head with an image adaptor (ViSpec): text first, then what the target says of pictures.

Kang et al. 2025. The first stage is on text: EAGLE's loss and the order of the target's likeliest
tokens. The second is on long answers of the target itself, and asks for its distributions alone.
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
    Lesson,
    check_continues,
    new_head,
    read_noisy,
    said_and_wanted,
    through_prompt,
)
from mmspec.training.losses import list_mle, soft_cross_entropy, total_variation
from mmspec.training.trainable import HeadTraining


def text_loss(
    reader: Reader, head: FeatureHead, lesson: Lesson, noise: float = 0.1, weight: float = 0.1
) -> Tensor:  # ()
    """Stage 1: smooth L1 + `weight` (cross entropy + 0.1 ListMLE of the 10 likeliest)."""
    own, wanted = said_and_wanted(reader, head, lesson, noise)
    said, distribution = reader.head(own), reader.head(wanted)
    spoken = soft_cross_entropy(said, distribution) + 0.1 * list_mle(said, distribution)
    return functional.smooth_l1_loss(own, wanted) + weight * spoken


def vispec_loss(
    reader: Reader, head: FeatureHead, lesson: Lesson, noise: float = 0.1, passes: int = 2
) -> Tensor:  # ()
    """Stage 2: 10 x total variation + 0.1 ListMLE, no loss of states, in sum over passes.

    The first pass reads the target's states; each further one reads what the pass before said, one
    slot later, behind the first state of the target's.
    """
    read, prompt = read_noisy(reader, head, lesson, noise)
    distribution = reader.head(read.next[read.real])
    total = torch.zeros((), device=distribution.device)
    for _ in range(passes):
        own = through_prompt(head, prompt)
        said = reader.head(own[:, -read.next.shape[1] :][read.real])
        total = (
            total + 10 * total_variation(said, distribution) + 0.1 * list_mle(said, distribution)
        )
        first = prompt.seen.long().cumsum(-1) == 1
        fed = torch.where(first[..., None], prompt.states, own.roll(1, 1))
        prompt = replace(prompt, states=fed)
    return total


VISPEC = HeadTraining(
    partial(new_head, visual_slots="compressed", num_q=2), vispec_loss, check_continues, rate=3e-6
)
