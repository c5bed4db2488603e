"""Teach a feature head what its target is going to say.

reader = accelerate(model, "plain").backbone           # the target, frozen
head = FeatureHead(FeatureHeadConfig.of(reader.config, reader.vocabulary))
learn_head(reader, head, lessons, steps=2000, rate=1e-3)
head.save_pretrained(folder)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.feature_head import check_head
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.targets.hooks import HiddenStateHook
from mmspec.targets.memory import block
from mmspec.targets.reader import Reader
from mmspec.training.reporting import Report, silent
from mmspec.training.trainable import HeadTraining, learn


@dataclass(frozen=True)
class Lesson:
    """Requests and what is said to them, best by the target itself.

    `inputs` are the target's: of `generate`, or, for a model that draws, what its family makes of a
    request, with `guidance_scale` (any but 1) and `negative` to learn both branches. `tokens` (B,
    T) follow the prompts; behind the end of a row they are -1.
    """

    inputs: Mapping[str, Any]
    tokens: Tensor


def learn_head(
    reader: Reader,
    head: FeatureHead,
    lessons: Iterator[Lesson],
    steps: int,
    rate: float = 1e-4,
    progress: Report = silent,
    noise: float = 0.1,
    weight: float = 0.1,
) -> None:
    """Train `head` to continue the states of a model, which is read once per lesson and frozen.

    EAGLE's loss (Li et al. 2024, section 4.2): smooth L1 between the states, plus `weight` times
    the cross entropy against the target's law, over the tokens of the lesson; the states that go in
    carry uniform noise of +-`noise`. AdamW, 3 % warm-up, then a cosine fall to a fiftieth. Raises
    ValueError for a head of another target.
    """
    training = replace(EAGLE, loss=partial(head_loss, noise=noise, weight=weight))
    learn(training, reader, head, lessons, steps, rate, progress)


def head_loss(
    reader: Reader, head: FeatureHead, lesson: Lesson, noise: float = 0.1, weight: float = 0.1
) -> Tensor:  # ()
    """EAGLE's loss over a lesson."""
    return _loss(read(reader, lesson), reader, head, noise, weight)


def new_head(target: Reader, counts: Tensor, **changes: Any) -> FeatureHead:
    """An untrained head for a target."""
    return FeatureHead(FeatureHeadConfig.of(target.config, target.vocabulary, **changes))


EAGLE = HeadTraining(new_head, head_loss, check_head)


@dataclass(frozen=True)
class Pairs:
    """A lesson as the head reads it: slot t holds token t + 1 and the state of slot t.

    R rows are B, or 2B with both branches; L slots of the prompt come before T of new tokens.
    """

    embeds: Tensor  # (R, L + T, D)
    states: Tensor  # (R, L + T, D)
    seen: Tensor  # (R, L + T) bool, False = padding in front of a prompt
    next: Tensor  # (R, T, D) the states that the last T slots lead to
    real: Tensor  # (R, T) bool, False = behind the end of a row


@torch.no_grad()
def read(reader: Reader, lesson: Lesson) -> Pairs:
    """Let the target read a lesson."""
    tokens = lesson.tokens.clamp_min(0)
    with HiddenStateHook(reader) as prompt:
        memory, _, _ = reader.prefill(lesson.inputs, room=tokens.shape[1])
    said = Draft.chain(tokens[:, 1:], Kind.DET)
    layout = block(tokens[:, :1].tolist(), said, memory.like)
    _, after = reader.read(memory, layout, hidden=True)
    assert after is not None
    branches = len(after) // len(tokens)
    embeds = torch.cat((prompt.embeds[:, 1:], reader.embed(tokens).repeat(branches, 1, 1)), 1)
    states = torch.cat((prompt.hidden, after[:, :-1]), 1)
    slots = torch.arange(embeds.shape[1], device=embeds.device)
    seen = slots >= torch.tensor(memory.padding, device=slots.device)[:, None]
    return Pairs(embeds, states, seen, after, (lesson.tokens >= 0).repeat(branches, 1))


def _loss(pairs: Pairs, reader: Reader, head: FeatureHead, noise: float, weight: float) -> Tensor:
    shaken = pairs.states + noise * (2 * torch.rand_like(pairs.states) - 1)
    position = (pairs.seen.long().cumsum(-1) - 1).clamp_min(0)
    mask = None if bool(pairs.seen.all()) else pairs.seen
    out = head(pairs.embeds, shaken, mask, position)[:, -pairs.next.shape[1] :][pairs.real]
    wanted = pairs.next[pairs.real]
    law = reader.head(wanted).float().softmax(-1)
    said = reader.head(out).float().log_softmax(-1)
    spoken: Tensor = (law * said).sum(-1).mean()
    return functional.smooth_l1_loss(out, wanted) - weight * spoken
