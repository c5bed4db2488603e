"""Teach an adapter behind the first layers of a target what the whole target says (Kangaroo)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.drafters.neural.kangaroo import check_adapter
from mmspec.models.heads.kangaroo import KangarooAdapter, KangarooAdapterConfig
from mmspec.targets.readers.hooks import layer_states
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import Lesson, ReadLesson, read_lesson
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining


def kangaroo_loss(reader: Reader, adapter: KangarooAdapter, lesson: Lesson) -> Tensor:  # ()
    """Cross entropy of the adapter's distribution behind each token against the target's own."""
    said, read = _said(reader, adapter, lesson)
    return soft_cross_entropy(reader.head(said[read.real]), reader.head(read.next[read.real]))


def imitation_loss(reader: Reader, adapter: KangarooAdapter, lesson: Lesson) -> Tensor:  # ()
    """The same, cross entropy against the tokens, and 1 - cosine to the target's last states.

    All weigh alike (FastVLM; reconstructed).
    """
    said, read = _said(reader, adapter, lesson)
    states, wanted = said[read.real], read.next[read.real]
    logits = reader.head(states)
    distance = 1 - functional.cosine_similarity(states.float(), wanted.float(), -1).mean()
    tokens = lesson.tokens.repeat(len(said) // len(lesson.tokens), 1)[:, 1:]
    known = tokens >= 0
    hard = functional.cross_entropy(reader.head(said[:, :-1][known]).float(), tokens[known])
    return soft_cross_entropy(logits, reader.head(wanted)) + hard + distance


def _said(
    reader: Reader, adapter: KangarooAdapter, lesson: Lesson
) -> tuple[Tensor, ReadLesson]:  # (R, T, D)
    """What the adapter gives the output head behind each token of a lesson."""
    read = read_lesson(reader, lesson, layer_states([adapter.config.exit_layer]))
    early = read.prompt.features
    slots = torch.arange(early.shape[1], device=early.device)
    start = torch.tensor(list(read.prompt.padding), device=early.device)[:, None]
    mask = slots >= start if any(read.prompt.padding) else None
    said = adapter(early, mask, (slots - start).clamp_min(0))
    return said[:, -read.next.shape[1] :], read


def new_adapter(target: Reader, counts: Tensor, **changes: Any) -> KangarooAdapter:
    """An untrained adapter for a target."""
    config = KangarooAdapterConfig.of(target.config, target.vocabulary, **changes)
    return KangarooAdapter(config)


def new_imitation(target: Reader, counts: Tensor, **changes: Any) -> KangarooAdapter:
    """An untrained adapter behind the first quarter of a target's layers."""
    quarter = max(len(target.layers) // 4, 1)
    return new_adapter(target, counts, **{"exit_layer": quarter, **changes})


KANGAROO = HeadTraining(new_adapter, kangaroo_loss, check_adapter, rate=1e-4)
FASTVLM = HeadTraining(new_imitation, imitation_loss, check_adapter, rate=1e-4)
