"""Teach a model to see the same things on any ground: it shows its text model a plain picture.

The text model stays as it is. What the vision tower and the projector show of a textured picture,
or of a person's drawing, is to be what they showed of a plain picture of the same facts before this
lesson; and of plain pictures, what they showed of these.
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

from mmspec.training.fitting import Course, Fall, chunks, divided, fit
from mmspec.zoo.boards import BOARD_CLASSES, PIXELS, board_loss, boards, pixels
from mmspec.zoo.scene import BOARD, COLOURS, SHAPES, SIZES, Scene, Thing, textured
from tools.zoo.vlm.batches import training_scenes
from tools.zoo.vlm.drawings import drawing
from tools.zoo.vlm.families import ZooFamily, image_features
from tools.zoo.vlm.learning import vision_parameters

_CELL = PIXELS // BOARD  # pixels
_SEEN = 64  # pictures in a batch: a quarter plain, a quarter textured, and drawings
_POOL = 80_000  # pictures, drawn once and looked at again and again
_PROBE = Fall(400, 3e-3)
_NAMED = 0.2  # weight of what can be named beside what is shown
_FLOOR = 0.02  # of the rate, at the end


@dataclass(frozen=True)
class View:
    """Pictures (B, P, P, 3), the plain ones they are to look like, and their boards (B, 9, 3)."""

    images: np.ndarray
    plain: np.ndarray
    boards: Tensor


def learn_to_see_anywhere(
    model: PreTrainedModel, family: ZooFamily, falls: Sequence[Fall], course: Course
) -> None:
    """Train the vision tower and the projector to show what they show of plain pictures now."""
    before = deepcopy(model).eval().requires_grad_(False)
    items = views(_SEEN, course.cut(_POOL, _SEEN), course)
    probe = _probe(before, family, items, course)
    shown = _shown(before, family, next(items).plain)
    spread = (shown - shown.mean((0, 1))).square().mean()

    def loss_of(view: View) -> Tensor:
        wanted = _shown(before, family, view.plain)
        found = image_features(model, family.image_inputs(view.images))
        named = board_loss(probe(_cells(found)), view.boards)
        return functional.mse_loss(found, wanted) / spread + _NAMED * named

    learnt = vision_parameters(model)
    matrices, others = divided(nn.ParameterList(learnt), learnt)
    for fall in falls:
        fit(others, items, loss_of, fall, "see anywhere", course, matrices, floor=_FLOOR)


def views(batch: int, pool: int, course: Course) -> Iterator[View]:
    """Batches without end from a pool of so many pictures; the last quarter of each is plain."""
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
    """Plain pictures of what is in each place, everything in the middle of its cell, as bytes."""
    cells = tiles[tuple(board.numpy().transpose(2, 0, 1))]
    found: np.ndarray = einops.rearrange(cells, "b (r c) h w k -> b (r h) (c w) k", r=BOARD)
    return found


def thing_tiles() -> np.ndarray:  # -> (names, colours, sizes, C, C, 3) bytes; 0 is nothing
    """Every thing in the middle of a cell of a plain picture."""
    paper = pixels(Scene(()))[:_CELL, :_CELL]
    found = np.broadcast_to(paper, (*BOARD_CLASSES, *paper.shape)).copy()
    middle = slice(_CELL, 2 * _CELL)
    for name, colour, size in np.ndindex(*(n - 1 for n in BOARD_CLASSES)):
        digit = name - len(SHAPES) if name >= len(SHAPES) else None
        shape = SHAPES[name] if digit is None else "digit"
        thing = Thing(shape, COLOURS[colour], SIZES[size], 1, 1, digit)
        found[name + 1, colour + 1, size + 1] = pixels(Scene((thing,)))[middle, middle]
    return found


def _pictures(
    count: int, generator: np.random.Generator, course: Course
) -> tuple[np.ndarray, Tensor]:  # (N, P, P, 3) bytes and (N, 9, 3)
    """Drawings, twice as many as textured pictures, and these as many as plain ones."""
    found: list[tuple[np.ndarray, Scene]] = []
    quarter = count // 4
    scenes = training_scenes(quarter, course.seed)
    kinds: tuple[Callable[[Scene], tuple[np.ndarray, Scene]], ...] = (
        lambda scene: drawing(generator),
        lambda scene: drawing(generator),
        lambda scene: _photographed(textured(scene, generator)),
        _photographed,
    )
    for kind in kinds:
        for some in chunks(next(scenes), _SEEN, "draw", course.progress):
            found += [kind(scene) for scene, _ in some]
    return np.stack([picture for picture, _ in found]), boards([scene for _, scene in found])


def _photographed(scene: Scene) -> tuple[np.ndarray, Scene]:
    return pixels(scene), scene


def _probe(
    model: PreTrainedModel, family: ZooFamily, items: Iterator[View], course: Course
) -> nn.Module:
    """What reads the board off all that the text model is shown of plain pictures."""
    width = 4 * model.config.get_text_config().hidden_size
    norm = nn.LayerNorm(width, elementwise_affine=False)
    probe = nn.Sequential(norm, nn.Linear(width, sum(BOARD_CLASSES)))

    def loss_of(view: View) -> Tensor:
        return board_loss(probe(_cells(_shown(model, family, view.plain))), view.boards)

    fit(list(probe.parameters()), items, loss_of, _PROBE, "probe", course, floor=_FLOOR)
    return probe.requires_grad_(False)


@torch.no_grad()
def _shown(model: PreTrainedModel, family: ZooFamily, images: np.ndarray) -> Tensor:
    return image_features(model, family.image_inputs(images))


def _cells(features: Tensor) -> Tensor:  # (B, 36, D) -> (B, 9, 4 D)
    return einops.rearrange(features, "b (r m c n) d -> b (r c) (m n d)", r=BOARD, m=2, c=BOARD)
