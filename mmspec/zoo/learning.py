"""Teach a model: first to see (what is in each cell), then to talk (next-token loss on answers)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import einops
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.modalities.vlm.zoo.families import Family, image_features
from mmspec.zoo.batches import BOARD_CLASSES, IGNORED, Batch, boards

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
Progress = Callable[[str, int, int, float], None]  # (stage, step, steps, loss)


def silent(stage: str, step: int, steps: int, loss: float) -> None:
    """Report nothing."""


def learn_to_see(
    model: PreTrainedModel,
    family: Family,
    steps: int,
    seed: int,
    batch: int = 64,
    rate: float = 2e-3,
    progress: Progress = silent,
) -> None:
    """Train the vision tower and the projector to tell what is in each of the nine cells."""
    width = model.config.get_text_config().hidden_size
    heads = nn.Linear(width, sum(BOARD_CLASSES))

    def loss_of(item: tuple[np.ndarray, Tensor]) -> Tensor:
        images, board = item
        features = image_features(model, family.image_inputs(images))
        cells = einops.reduce(features, "b (r m c n) d -> b (r c) d", "mean", r=3, m=2, c=3, n=2)
        parts = heads(functional.layer_norm(cells, (width,))).float().split(BOARD_CLASSES, -1)
        losses = [
            functional.cross_entropy(p.flatten(0, 1), t.flatten())
            for p, t in zip(parts, board.unbind(-1), strict=True)
        ]
        return torch.stack(losses).sum()

    learnt = [*_vision(model), *heads.parameters()]
    fit(learnt, boards(batch, seed), loss_of, steps, rate, "see", progress)


def learn_to_see_like(
    model: PreTrainedModel,
    family: Family,
    other: PreTrainedModel,
    other_family: Family,
    steps: int,
    seed: int,
    batch: int = 64,
    rate: float = 2e-3,
    progress: Progress = silent,
) -> None:
    """Train the vision tower and the projector to show the text model what `other` shows its own.

    Both show the same number of image tokens in the same order.
    """

    def loss_of(item: tuple[np.ndarray, Tensor]) -> Tensor:
        images, _ = item
        with torch.no_grad():
            wanted = image_features(other, other_family.image_inputs(images))
        features = image_features(model, family.image_inputs(images))
        return functional.mse_loss(features, wanted) / wanted.var()

    fit(_vision(model), boards(batch, seed), loss_of, steps, rate, "see", progress)


def learn_to_talk(
    model: PreTrainedModel,
    family: Family,
    batches: Iterable[Batch],
    steps: int,
    rate: float,
    progress: Progress = silent,
) -> None:
    """Train the whole model on the words of answers."""

    def loss_of(batch: Batch) -> Tensor:
        logits = logits_of(model, family, batch)[:, :-1]
        return functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )

    fit(list(model.parameters()), iter(batches), loss_of, steps, rate, "talk", progress)


def logits_of(model: PreTrainedModel, family: Family, batch: Batch) -> Tensor:  # -> (B, L, V)
    """Next-token logits at every position. A text model just reads the ids, images and all."""
    inputs: dict[str, Tensor] = {"input_ids": batch.ids}
    if model.config.sub_configs:  # a vision tower beside the text model
        inputs |= family.image_inputs(batch.images) | family.positions(model, batch.ids)
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def _vision(model: PreTrainedModel) -> list[nn.Parameter]:
    """Everything but the text model."""
    named = model.named_parameters()
    return [p for n, p in named if "language_model" not in n and "lm_head" not in n]


def fit(
    parameters: list[nn.Parameter],
    items: Iterator[T],
    loss_of: Callable[[T], Tensor],
    steps: int,
    rate: float,
    stage: str,
    progress: Progress,
) -> None:
    """AdamW with a short warm-up and a cosine fall to a fiftieth."""
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda i: _share(i, steps))
    for step in range(steps):
        loss = loss_of(next(items))
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        progress(stage, step + 1, steps, float(loss.detach()))


def _share(step: int, steps: int) -> float:
    warm = min(100, max(1, steps // 10))
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
    return min(1.0, (step + 1) / warm) * (0.02 + 0.98 * fall)
