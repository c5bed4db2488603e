"""Teach a head on what it will read: its own states (EAGLE-3's training-time test, HASS, HiViS).

A draft's first state is the target's, the next ones are the head's. So a lesson is read several
times, and in every pass but the first each place reads what the head said in the pass before:

    pass 0   slot t   reads the target's states of slots 0..t
    pass i   slot t   stands for slot t + i: it reads the target's states of slots 0..t, and the
                      head's own of slots t + 1 .. t + i, one from each pass

which is what drafting reads: tokens move up by one place a pass, and so do positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from mmspec.drafters.neural.feature_head import check_head
from mmspec.drafters.neural.head_prompt import HeadPrompt, head_prompt
from mmspec.models.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from mmspec.models.heads.state_head import SlotMarks, StateHead
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import (
    Lesson,
    check_continues,
    new_head,
    read_lesson,
    read_noisy,
    told_to,
)
from mmspec.training.losses import soft_cross_entropy, top_cross_entropy
from mmspec.training.trainable import HeadTraining


def self_fed(head: StateHead, prompt: HeadPrompt, last: int, passes: int) -> Iterator[Tensor]:
    """States (R, T, D) of the `last` T slots in each pass, as the head would say them drafting.

    Slot t of pass i stands for slot t + i; where that is behind the lesson it means nothing.
    """
    device, like = prompt.embeds.device, prompt.states
    count = prompt.embeds.shape[1]
    hide = torch.finfo(like.dtype).min
    seen = prompt.seen[:, None, None] & torch.ones(count, count, device=device).bool().tril()
    mask = torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, hide)
    cache = DynamicCache(config=head.config)
    own = head(
        prompt.embeds, like, mask, prompt.positions, past_key_values=cache, marks=prompt.marks
    )[:, -last:]
    yield own
    alone = torch.full((last, last), hide, dtype=like.dtype, device=device).fill_diagonal_(0)
    alone = alone.expand(len(seen), 1, -1, -1)
    mask = mask[:, :, -last:]
    for again in range(1, passes):
        embeds = functional.pad(prompt.embeds[:, -last:], (0, 0, 0, again))[:, again:]
        mask = torch.cat((mask, alone), -1)
        places = prompt.positions[..., -last:] + again
        steps = torch.full((1, last), again, device=device)
        marks = SlotMarks(steps, None, prompt.global_vector)
        own = head(embeds, own, mask, places, past_key_values=cache, marks=marks)
        yield own


def eagle3_loss(
    reader: Reader, head: Eagle3Head, lesson: Lesson, passes: int = 7, discount: float = 0.8
) -> Tensor:  # ()
    """Soft cross entropy of pass i, times `discount`^i, in sum over passes (Li et al. 2025).

    The target's distribution is that over the tokens which the head speaks; places where its
    likeliest token is none of them teach nothing.
    """
    read = read_lesson(reader, lesson, *told_to(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), read.next.shape[1]
    distributions = reader.head(read.next)
    is_spoken = read.real
    if head.is_cut:
        is_spoken = is_spoken & head.t2d[distributions.argmax(-1)]
        distributions = distributions[..., head.token_ids]
    total = torch.zeros((), device=distributions.device)
    for late, own in enumerate(self_fed(head, prompt, length, min(passes, length))):
        taught = is_spoken[:, late:]
        if bool(taught.any()):
            said = head.logits(own[:, : length - late][taught], reader.head)
            loss = soft_cross_entropy(said, distributions[:, late:][taught])
            total = total + discount**late * loss
        else:
            total = total + 0.0 * own.sum()
    return total


def aligned_loss(
    reader: Reader,
    head: StateHead,
    lesson: Lesson,
    passes: int = 3,
    noise: float = 0.1,
    weight: float = 0.1,
    top: int = 10,
    top_weight: float = 1.0,
) -> Tensor:  # ()
    """EAGLE's loss in every pass, and the target's `top` likeliest tokens, in mean over passes.

    HASS (Zhang et al. 2024): harmonised objective and context. top_weight=0 leaves the likeliest
    tokens out (HiViS).
    """
    read, prompt = read_noisy(reader, head, lesson, noise)
    length = read.next.shape[1]
    distributions = reader.head(read.next)
    count = min(passes, length)
    total = torch.zeros((), device=distributions.device)
    for late, own in enumerate(self_fed(head, prompt, length, count)):
        real = read.real[:, late:]
        if not bool(real.any()):
            continue
        states, wanted = own[:, : length - late][real], distributions[:, late:][real]
        said = head.logits(states, reader.head)
        loss = functional.smooth_l1_loss(states, read.next[:, late:][real])
        loss = loss + weight * soft_cross_entropy(said, wanted)
        total = total + loss + top_weight * top_cross_entropy(said, wanted, top)
    return total / count


def new_eagle3(target: Reader, counts: Tensor, **changes: Any) -> Eagle3Head:
    """An untrained head that speaks the tokens said most often, as many as `draft_vocab_size`.

    Ties go to the smaller id.
    """
    config = Eagle3HeadConfig.of(target.config, target.vocabulary, **changes)
    head = Eagle3Head(config)
    if head.is_cut:
        often = counts.sort(descending=True, stable=True).indices
        head.speak(often[: len(head.d2t)])
    return head


EAGLE3 = HeadTraining(new_eagle3, eagle3_loss, check_head, rate=5e-5)
HASS = HeadTraining(new_head, aligned_loss, check_continues, rate=3e-5)
HIVIS = replace(
    HASS,
    begin=partial(new_head, visual_slots="hidden", positions="compact", num_steps=7),
    loss=partial(aligned_loss, passes=8, top_weight=0.0),
)
