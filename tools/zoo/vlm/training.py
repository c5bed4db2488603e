"""Training stages: the vision tower on board labels, then the whole model on answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import einops
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from mmspec.training.fitting import CosineDecay, TrainingRun, fit
from mmspec.zoo.scene_tensors import BOARD_CLASSES, board_loss
from tools.zoo.vlm.batches import IGNORED, Batch, Renderer, iterate_board_batches, render_plain
from tools.zoo.vlm.families import ZooFamily, image_features

BoardBatch = tuple[np.ndarray, Tensor]  # images, and board labels
_FLOOR = 0.02  # of the learning rate at the end of a stage
_VISION_BATCH, _VISION_RATE = 64, 2e-3


def train_vision(
    model: PreTrainedModel,
    family: ZooFamily,
    steps: int,
    course: TrainingRun,
    renderer: Renderer = render_plain,
) -> None:
    """Train the vision tower and the projector to classify the nine cells."""
    width = model.config.get_text_config().hidden_size
    heads = nn.Linear(width, sum(BOARD_CLASSES))

    def loss_of(item: BoardBatch) -> Tensor:
        images, board = item
        features = image_features(model, family.image_inputs(images))
        cells = einops.reduce(features, "b (r m c n) d -> b (r c) d", "mean", r=3, m=2, c=3, n=2)
        return board_loss(heads(functional.layer_norm(cells, (width,))).float(), board)

    learnt = [*vision_parameters(model), *heads.parameters()]
    _fit_vision(learnt, loss_of, steps, course, renderer)


def distil_vision(
    model: PreTrainedModel,
    family: ZooFamily,
    other: tuple[PreTrainedModel, ZooFamily],
    steps: int,
    course: TrainingRun,
    renderer: Renderer = render_plain,
) -> None:
    """Train the vision tower and the projector to match the image features of another model.

    Both have the same number of image tokens in the same order.
    """
    teacher, teacher_family = other

    def loss_of(item: BoardBatch) -> Tensor:
        images, _ = item
        with torch.no_grad():
            targets = image_features(teacher, teacher_family.image_inputs(images))
        features = image_features(model, family.image_inputs(images))
        return functional.mse_loss(features, targets) / targets.var()

    _fit_vision(vision_parameters(model), loss_of, steps, course, renderer)


def _fit_vision(
    learnt: list[nn.Parameter],
    loss_of: Callable[[BoardBatch], Tensor],
    steps: int,
    course: TrainingRun,
    renderer: Renderer,
) -> None:
    items, fall = (
        iterate_board_batches(_VISION_BATCH, course.seed, renderer),
        CosineDecay(steps, _VISION_RATE),
    )
    fit(learnt, items, loss_of, fall, "see", course, floor=_FLOOR)


def train_on_responses(
    model: PreTrainedModel,
    family: ZooFamily,
    batches: Iterable[Batch],
    fall: CosineDecay,
    course: TrainingRun,
) -> None:
    """Train the whole model on the tokens of answers."""

    def loss_of(batch: Batch) -> Tensor:
        logits = logits_of(model, family, batch)[:, :-1]
        return functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )

    learnt = list(model.parameters())
    fit(learnt, iter(batches), loss_of, fall, "talk", course, floor=_FLOOR)


def logits_of(
    model: PreTrainedModel, family: ZooFamily | None, batch: Batch
) -> Tensor:  # -> (B, L, V)
    """Return next-token logits at every position. A text model reads the image tokens as ids."""
    inputs: dict[str, Tensor] = {"input_ids": batch.ids}
    if model.config.sub_configs:  # with a vision tower
        assert family is not None
        inputs |= family.image_inputs(batch.images) | family.positions(model, batch.ids)
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


def answer_loss(
    model: PreTrainedModel, family: ZooFamily | None, weights: Tensor
) -> Callable[[Batch], Tensor]:
    """Return the cross entropy of the answers of a batch, with the weights (V,) of the words."""

    def loss_of(batch: Batch) -> Tensor:
        logits = logits_of(model, family, batch)[:, :-1]
        return functional.cross_entropy(
            logits.float().flatten(0, 1),
            batch.labels[:, 1:].flatten(),
            weight=weights,
            ignore_index=IGNORED,
        )

    return loss_of


def vision_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return all parameters outside the text model."""
    named = model.named_parameters()
    return [p for n, p in named if "language_model" not in n and "lm_head" not in n]
