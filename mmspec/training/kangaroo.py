"""Teach an adapter behind the first layers of a target what the whole target says (Kangaroo)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmspec.drafters.neural.kangaroo import check_adapter
from mmspec.models.heads.kangaroo import KangarooAdapter, KangarooAdapterConfig
from mmspec.targets.hooks import layer_states
from mmspec.targets.reader import Reader
from mmspec.training.heads import Lesson, read_lesson
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.reporting import Report, silent
from mmspec.training.trainable import HeadTraining, learn


def kangaroo_loss(reader: Reader, adapter: KangarooAdapter, lesson: Lesson) -> Tensor:  # ()
    """Cross entropy of the adapter's law behind each token against the target's own."""
    read = read_lesson(reader, lesson, layer_states([adapter.config.exit_layer]))
    early = read.prompt.features
    slots = torch.arange(early.shape[1], device=early.device)
    start = torch.tensor(list(read.prompt.padding), device=early.device)[:, None]
    mask = slots >= start if any(read.prompt.padding) else None
    said = adapter(early, mask, (slots - start).clamp_min(0))[:, -read.next.shape[1] :]
    return soft_cross_entropy(reader.head(said[read.real]), reader.head(read.next[read.real]))


def new_adapter(target: Reader, counts: Tensor, **changes: Any) -> KangarooAdapter:
    """An untrained adapter for a target."""
    config = KangarooAdapterConfig.of(target.config, target.vocabulary, **changes)
    return KangarooAdapter(config)


KANGAROO = HeadTraining(new_adapter, kangaroo_loss, check_adapter, rate=1e-4)


def learn_kangaroo(
    reader: Reader,
    adapter: KangarooAdapter,
    lessons: Iterator[Lesson],
    steps: int,
    rate: float = KANGAROO.rate,
    progress: Report = silent,
) -> None:
    """Train an adapter beside a frozen target. Raises ValueError for one of another target."""
    learn(KANGAROO, reader, adapter, lessons, steps, rate, progress)
