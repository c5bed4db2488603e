"""Teach a model: first to see (what is in each cell), then to talk (next-token loss on answers)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import einops
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from mmspec.training.fitting import Course, Fall, fit
from mmspec.zoo.boards import BOARD_CLASSES, board_loss
from tools.zoo.vlm.batches import IGNORED, Batch, Looks, plainly, seen
from tools.zoo.vlm.families import ZooFamily, image_features

Shown = tuple[np.ndarray, Tensor]  # pictures, and what is in each cell
_FLOOR = 0.02  # of the rate, at the end of a stage
_SEEN, _SEEING = 64, 2e-3  # pictures in a batch, and rate, of what teaches to see


def learn_to_see(
    model: PreTrainedModel,
    family: ZooFamily,
    steps: int,
    course: Course,
    looks: Looks = plainly,
) -> None:
    """Train the vision tower and the projector to tell what is in each of the nine cells."""
    width = model.config.get_text_config().hidden_size
    heads = nn.Linear(width, sum(BOARD_CLASSES))

    def loss_of(item: Shown) -> Tensor:
        images, board = item
        features = image_features(model, family.image_inputs(images))
        cells = einops.reduce(features, "b (r m c n) d -> b (r c) d", "mean", r=3, m=2, c=3, n=2)
        return board_loss(heads(functional.layer_norm(cells, (width,))).float(), board)

    learnt = [*vision_parameters(model), *heads.parameters()]
    _fit_sight(learnt, loss_of, steps, course, looks)


def learn_to_see_like(
    model: PreTrainedModel,
    family: ZooFamily,
    other: tuple[PreTrainedModel, ZooFamily],
    steps: int,
    course: Course,
    looks: Looks = plainly,
) -> None:
    """Train the vision tower and the projector to show the text model what `other` shows its own.

    Both show the same number of image tokens in the same order.
    """
    teacher, its_family = other

    def loss_of(item: Shown) -> Tensor:
        images, _ = item
        with torch.no_grad():
            wanted = image_features(teacher, its_family.image_inputs(images))
        features = image_features(model, family.image_inputs(images))
        return functional.mse_loss(features, wanted) / wanted.var()

    _fit_sight(vision_parameters(model), loss_of, steps, course, looks)


def _fit_sight(
    learnt: list[nn.Parameter],
    loss_of: Callable[[Shown], Tensor],
    steps: int,
    course: Course,
    looks: Looks,
) -> None:
    items, fall = seen(_SEEN, course.seed, looks), Fall(steps, _SEEING)
    fit(learnt, items, loss_of, fall, "see", course, floor=_FLOOR)


def learn_to_talk(
    model: PreTrainedModel,
    family: ZooFamily,
    batches: Iterable[Batch],
    fall: Fall,
    course: Course,
) -> None:
    """Train the whole model on the words of answers."""

    def loss_of(batch: Batch) -> Tensor:
        logits = logits_of(model, family, batch)[:, :-1]
        return functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )

    learnt = list(model.parameters())
    fit(learnt, iter(batches), loss_of, fall, "talk", course, floor=_FLOOR)


def logits_of(model: PreTrainedModel, family: ZooFamily, batch: Batch) -> Tensor:  # -> (B, L, V)
    """Next-token logits at every position. A text model just reads the ids, images and all."""
    inputs: dict[str, Tensor] = {"input_ids": batch.ids}
    if model.config.sub_configs:  # a vision tower beside the text model
        inputs |= family.image_inputs(batch.images) | family.positions(model, batch.ids)
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Everything but the text model."""
    named = model.named_parameters()
    return [p for n, p in named if "language_model" not in n and "lm_head" not in n]
