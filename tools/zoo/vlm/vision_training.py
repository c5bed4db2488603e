"""Train the vision tower to be invariant to backgrounds and drawing styles.

The text model is frozen. The features of a textured image or a drawing are trained to match those
of a plain image of the same facts before this training; the features of plain images are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass

import einops
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from mmspec.training.fitting import CosineDecay, TrainingRun, fit, iterate_chunks, split_parameters
from mmspec.zoo.scene import BOARD, COLOURS, SHAPES, SIZES, Scene, Thing, add_texture
from mmspec.zoo.scene_tensors import BOARD_CLASSES, PIXELS, board_loss, encode_boards, render_pixels
from tools.zoo.vlm.batches import iterate_scenes
from tools.zoo.vlm.drawings import sample_drawing
from tools.zoo.vlm.families import ZooFamily, image_features
from tools.zoo.vlm.training import vision_parameters

_CELL = PIXELS // BOARD  # pixels
_BATCH = 64  # images: a quarter plain, a quarter textured, half drawings
_POOL = 80_000  # images, rendered once and used repeatedly
_PROBE = CosineDecay(400, 3e-3)
_PROBE_WEIGHT = 0.2  # of the loss of the probe
_FLOOR = 0.02  # of the learning rate at the end


@dataclass(frozen=True)
class View:
    """Images (B, P, P, 3), plain images of the same facts, and their board labels (B, 9, 3)."""

    images: np.ndarray
    plain: np.ndarray
    boards: Tensor


def train_vision_invariance(
    model: PreTrainedModel, family: ZooFamily, falls: Sequence[CosineDecay], course: TrainingRun
) -> None:
    """Train the vision tower and the projector towards their current features of plain images."""
    before = deepcopy(model).eval().requires_grad_(False)
    items = iterate_views(_BATCH, course.limit_steps(_POOL, _BATCH), course)
    probe = _probe(before, family, items, course)
    shown = _image_features(before, family, next(items).plain)
    spread = (shown - shown.mean((0, 1))).square().mean()

    def loss_of(view: View) -> Tensor:
        wanted = _image_features(before, family, view.plain)
        found = image_features(model, family.image_inputs(view.images))
        named = board_loss(probe(_cells(found)), view.boards)
        return functional.mse_loss(found, wanted) / spread + _PROBE_WEIGHT * named

    learnt = vision_parameters(model)
    matrices, others = split_parameters(nn.ParameterList(learnt), learnt)
    for fall in falls:
        fit(others, items, loss_of, fall, "see anywhere", course, matrices, floor=_FLOOR)


def iterate_views(batch: int, pool: int, course: TrainingRun) -> Iterator[View]:
    """Iterate over batches of a pool of images, without end; the last quarter of each is plain."""
    generator = np.random.default_rng((course.seed, 6))
    images, board = _pictures(pool, generator, course)
    tiles, quarter = thing_tiles(), len(images) // 4
    while True:
        picks = generator.integers(quarter, size=(4, batch // 4)) + quarter * np.arange(4)[:, None]
        seen, facts = images[picks.ravel()], board[picks.ravel()]
        plain = plain_pictures(facts, tiles)
        plain[-(batch // 4) :] = seen[-(batch // 4) :]
        yield View(seen, plain, facts)


def plain_pictures(board: Tensor, tiles: np.ndarray) -> np.ndarray:  # (B, 9, 3) -> (B, P, P, 3)
    """Render plain images of board labels, each thing in the middle of its cell, as bytes."""
    cells = tiles[tuple(board.numpy().transpose(2, 0, 1))]
    found: np.ndarray = einops.rearrange(cells, "b (r c) h w k -> b (r h) (c w) k", r=BOARD)
    return found


def thing_tiles() -> np.ndarray:  # -> (names, colours, sizes, C, C, 3) bytes; 0 is nothing
    """Render every thing in the middle of a cell of a plain image."""
    paper = render_pixels(Scene(()))[:_CELL, :_CELL]
    found = np.broadcast_to(paper, (*BOARD_CLASSES, *paper.shape)).copy()
    middle = slice(_CELL, 2 * _CELL)
    for name, colour, size in np.ndindex(*(n - 1 for n in BOARD_CLASSES)):
        digit = name - len(SHAPES) if name >= len(SHAPES) else None
        shape = SHAPES[name] if digit is None else "digit"
        thing = Thing(shape, COLOURS[colour], SIZES[size], 1, 1, digit)
        found[name + 1, colour + 1, size + 1] = render_pixels(Scene((thing,)))[middle, middle]
    return found


def _pictures(
    count: int, generator: np.random.Generator, course: TrainingRun
) -> tuple[np.ndarray, Tensor]:  # (N, P, P, 3) bytes and (N, 9, 3)
    """Render the pool: half drawings, a quarter textured, a quarter plain."""
    found: list[tuple[np.ndarray, Scene]] = []
    quarter = count // 4
    scenes = iterate_scenes(quarter, course.seed)
    kinds: tuple[Callable[[Scene], tuple[np.ndarray, Scene]], ...] = (
        lambda scene: sample_drawing(generator),
        lambda scene: sample_drawing(generator),
        lambda scene: _render(add_texture(scene, generator)),
        _render,
    )
    for kind in kinds:
        for some in iterate_chunks(next(scenes), _BATCH, "draw", course.progress):
            found += [kind(scene) for scene, _ in some]
    return np.stack([picture for picture, _ in found]), encode_boards([scene for _, scene in found])


def _render(scene: Scene) -> tuple[np.ndarray, Scene]:
    return render_pixels(scene), scene


def _probe(
    model: PreTrainedModel, family: ZooFamily, items: Iterator[View], course: TrainingRun
) -> nn.Module:
    """Train a linear probe that predicts the board from the features of plain images."""
    width = 4 * model.config.get_text_config().hidden_size
    norm = nn.LayerNorm(width, elementwise_affine=False)
    probe = nn.Sequential(norm, nn.Linear(width, sum(BOARD_CLASSES)))

    def loss_of(view: View) -> Tensor:
        return board_loss(probe(_cells(_image_features(model, family, view.plain))), view.boards)

    fit(list(probe.parameters()), items, loss_of, _PROBE, "probe", course, floor=_FLOOR)
    return probe.requires_grad_(False)


@torch.no_grad()
def _image_features(model: PreTrainedModel, family: ZooFamily, images: np.ndarray) -> Tensor:
    return image_features(model, family.image_inputs(images))


def _cells(features: Tensor) -> Tensor:  # (B, 36, D) -> (B, 9, 4 D)
    return einops.rearrange(features, "b (r m c n) d -> b (r c) (m n d)", r=BOARD, m=2, c=BOARD)
