"""Moving scenes: things of the Scene world that move one after the other.

A moving scene is data: things, and moves with a first and a last frame. Frames, sentences and facts
are computed from it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from PIL import Image

from mmspec.zoo.scene import BOARD, Scene, Split, Thing, sample

FRAMES = 32
MAX_RATE = 8  # times `RATE_HZ`, at which a clip can be drawn
RATE_HZ = 2.0  # frames per second: a temporal patch of two frames lasts one second
DIRECTIONS = ("left", "right", "up", "down")

_MOVE_COUNT_PROBABILITIES = (0.4, 0.4, 0.2)  # of one, two, three moves
MAX_MOVES = len(_MOVE_COUNT_PROBABILITIES)
_MIN_FRAMES, _MAX_FRAMES = 4, 7  # of a move
_FIRST_SEED = 1 << 45  # clips have their own range of seeds
_FIRST_HELD_OUT_SEED = 1 << 46
_HELD_OUT_ONE_IN = 8
_STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@dataclass(frozen=True)
class Move:
    """A straight move of a thing to another cell: it starts after frame `first`, ends at `last`."""

    thing: int
    direction: str
    row: int
    column: int
    first: int
    last: int


@dataclass(frozen=True)
class MovingScene:
    """Things at their initial places, in reading order, and moves, in order of time."""

    things: tuple[Thing, ...]
    moves: tuple[Move, ...]

    def scene_at(self, frame: float) -> Scene:
        """Return the scene of a frame, or between two."""
        return Scene(tuple(self._thing_at(i, frame) for i in range(len(self.things))))

    def thing_at_end(self, thing: int) -> Thing:
        """Return a thing at its final place."""
        return self._thing_at(thing, FRAMES)

    def render(self, size: int = 96, rate: int = 1) -> list[Image.Image]:
        """Render all frames as square RGB images of `size` pixels, at `rate` times `RATE_HZ`."""
        images: dict[Scene, Image.Image] = {}  # most frames repeat the previous scene
        scenes = [self.scene_at(frame / rate) for frame in range(FRAMES * rate)]
        for scene in scenes:
            if scene not in images:
                images[scene] = scene.render(size)
        return [images[scene] for scene in scenes]

    def find_move(self, thing: int) -> Move | None:
        """Return the move of a thing; None if it stays."""
        return next((move for move in self.moves if move.thing == thing), None)

    @property
    def split(self) -> Split:
        """The split ("train" or "held-out"), a hash of facts and moves."""
        moves = [(move.thing, move.row, move.column) for move in self.moves]
        key = zlib.crc32(repr((Scene(self.things).facts(), moves)).encode())
        return "held-out" if key % _HELD_OUT_ONE_IN == 0 else "train"

    def _thing_at(self, thing: int, frame: float) -> Thing:
        one, move = self.things[thing], self.find_move(thing)
        if move is None or frame <= move.first:
            return one
        if frame >= move.last:
            return replace(one, row=move.row, column=move.column)
        share = (frame - move.first) / (move.last - move.first)
        x = one.shift[0] + share * (move.column - one.column)
        y = one.shift[1] + share * (move.row - one.row)
        return replace(one, shift=(x, y))


BUNDLED_CLIP = MovingScene(  # `zoo:clip`
    (
        Thing("star", "orange", "large", 0, 0, shift=(0.02, 0.03)),
        Thing("digit", "purple", "large", 1, 1, 3, shift=(0.03, -0.02)),
        Thing("ring", "green", "small", 2, 2, shift=(-0.04, 0.0)),
    ),
    (Move(0, "right", 0, 2, 4, 10), Move(2, "left", 2, 0, 16, 23)),
)


def sample_moving_scenes(
    count: int, split: Split = "train", seed: int = 0
) -> list[tuple[MovingScene, int]]:
    """Return `count` moving scenes of a split, each with its seed."""
    return list(islice(iterate_moving_scenes(split, seed), count))


def iterate_moving_scenes(
    split: Split = "train", seed: int = 0
) -> Iterator[tuple[MovingScene, int]]:
    """Iterate over moving scenes of a split and their seeds, without end."""
    for number in itertools.count(
        (seed << 24) + (_FIRST_HELD_OUT_SEED if split == "held-out" else _FIRST_SEED)
    ):
        scene = _sample_scene(number)
        if scene is not None and scene.split == split:
            yield scene, number


def _sample_scene(number: int) -> MovingScene | None:
    """Sample a moving scene; None if one of the chosen things cannot move."""
    things = sample(number).things
    generator = np.random.default_rng((number, 6))
    choices = len(_MOVE_COUNT_PROBABILITIES)
    count = 1 + int(generator.choice(choices, p=_MOVE_COUNT_PROBABILITIES))
    movers = [int(i) for i in generator.permutation(len(things))[:count]]
    spans = _sample_spans(len(movers), generator)
    taken = {(t.row, t.column) for t in things}
    moves: list[Move] = []
    for thing, (first, last) in zip(movers, spans, strict=True):
        one = things[thing]
        paths = _find_paths((one.row, one.column), taken)
        if not paths:
            return None
        direction, (row, column) = paths[generator.integers(len(paths))]
        taken ^= {(one.row, one.column), (row, column)}
        moves.append(Move(thing, direction, row, column, first, last))
    return MovingScene(things, tuple(moves))


def _sample_spans(count: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Sample the first and last frame of each move, with pauses before, between and after them."""
    lengths = generator.integers(_MIN_FRAMES, _MAX_FRAMES + 1, count)
    rests = 1 + generator.multinomial(
        FRAMES - 2 - count - int(lengths.sum()), [1 / (count + 1)] * (count + 1)
    )
    starts = np.cumsum(rests[:-1]) + np.concatenate(([0], np.cumsum(lengths[:-1])))
    return [(int(a), int(a + n)) for a, n in zip(starts, lengths, strict=True)]


def _find_paths(
    cell: tuple[int, int], taken: set[tuple[int, int]]
) -> list[tuple[str, tuple[int, int]]]:
    """Return directions and cells that a thing can reach in a straight line over free cells."""
    found = []
    for direction, (down, across) in _STEPS.items():
        row, column = cell[0] + down, cell[1] + across
        while 0 <= row < BOARD and 0 <= column < BOARD and (row, column) not in taken:
            found.append((direction, (row, column)))
            row, column = row + down, column + across
    return found
