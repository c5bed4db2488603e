"""Teach multi-token heads what comes after the next token.

reader = accelerate(model, "plain").backbone           # the target, frozen
heads = MultiTokenHeads(MultiTokenHeadsConfig.of(reader.config, reader.vocabulary, num_heads=4))
learn_multi_token(reader, heads, lessons, steps=2000, rate=1e-3)
heads.save_pretrained(folder)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.multi_token import check_heads
from mmspec.models.heads.multi_token import MultiTokenHeads
from mmspec.targets.reader import Reader
from mmspec.training.fitting import Course, Fall, fit
from mmspec.training.heads import Lesson, read
from mmspec.training.reporting import Report, silent


def learn_multi_token(
    reader: Reader,
    heads: MultiTokenHeads,
    lessons: Iterator[Lesson],
    steps: int,
    rate: float = 1e-3,
    progress: Report = silent,
    discount: float = 0.8,
) -> None:
    """Train `heads` on the states of a model, which is read once per lesson and frozen.

    Cross entropy of head h against token t + 1 + h, times `discount`^h (Medusa-1, Cai et al. 2024,
    eq. 1; Nguyen et al. 2025 for codes). AdamW, a warm-up, then a cosine fall. Raises ValueError
    for heads of another target.
    """
    check_heads(heads, reader)
    heads.train()
    course = Course(progress=progress)

    def loss_of(lesson: Lesson) -> Tensor:
        return heads_loss(reader, heads, lesson, discount)

    fit(list(heads.parameters()), lessons, loss_of, Fall(steps, rate), "heads", course)
    heads.train(False)


def heads_loss(
    reader: Reader, heads: MultiTokenHeads, lesson: Lesson, discount: float
) -> Tensor:  # ()
    """Cross entropy of each head where its token is known, in sum over heads."""
    length = lesson.tokens.shape[1]
    states = read(reader, lesson).states[:, -length:]  # the target says token t of state t
    tokens = lesson.tokens.repeat(len(states) // len(lesson.tokens), 1)
    said = reader.head(heads(states))  # (R, T, H, V)
    total = torch.zeros((), device=states.device)
    for head in range(min(heads.config.num_heads, length - 1)):
        ahead = head + 1
        logits, wanted = said[:, :-ahead, head].float(), tokens[:, ahead:]
        known = wanted >= 0
        if bool(known.any()):
            loss = functional.cross_entropy(logits[known], wanted[known])
            total = total + discount**ahead * loss
    return total
