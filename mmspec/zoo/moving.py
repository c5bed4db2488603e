"""Moving scenes: things of the Scene world that go from place to place, one after the other.

A moving scene is data, as a scene is: things, and moves between two frames each. Frames, sentences
and facts are computed from it.
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
RATE_HZ = 2.0  # frames a second, so that two of them, one visual slot in time, last a second
DIRECTIONS = ("left", "right", "up", "down")

_MOVER_LAW = (0.4, 0.4, 0.2)  # how often one, two, three things move
MOST_MOVES = len(_MOVER_LAW)
_SHORTEST, _LONGEST = 4, 7  # frames that a move takes
_NUMBERS = 1 << 45  # clips come from seeds of their own
_HELD_OUT_NUMBERS = 1 << 46
_HELD_OUT_ONE_IN = 8
_STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@dataclass(frozen=True)
class Move:
    """A thing goes straight to another cell: it leaves after frame `first`, is there at `last`."""

    thing: int
    direction: str
    row: int
    column: int
    first: int
    last: int


@dataclass(frozen=True)
class MovingScene:
    """Things as they stand at first, in reading order, and what they do, in order of time."""

    things: tuple[Thing, ...]
    moves: tuple[Move, ...]

    def at(self, frame: int) -> Scene:
        """What is seen in a frame."""
        return Scene(tuple(self._placed(i, frame) for i in range(len(self.things))))

    def end(self, thing: int) -> Thing:
        """A thing as it stands at last."""
        return self._placed(thing, FRAMES)

    def render(self, size: int = 96) -> list[Image.Image]:
        """All frames, square RGB pictures of `size` pixels."""
        drawn: dict[Scene, Image.Image] = {}  # most frames are those before
        seen = [self.at(frame) for frame in range(FRAMES)]
        for scene in seen:
            if scene not in drawn:
                drawn[scene] = scene.render(size)
        return [drawn[scene] for scene in seen]

    def mover(self, thing: int) -> Move | None:
        """What a thing does, if it does anything."""
        return next((move for move in self.moves if move.thing == thing), None)

    @property
    def split(self) -> Split:
        """The side of the train / held-out division it falls on: by things, places and moves."""
        moves = [(move.thing, move.row, move.column) for move in self.moves]
        key = zlib.crc32(repr((Scene(self.things).facts(), moves)).encode())
        return "held-out" if key % _HELD_OUT_ONE_IN == 0 else "train"

    def _placed(self, thing: int, frame: int) -> Thing:
        one, move = self.things[thing], self.mover(thing)
        if move is None or frame <= move.first:
            return one
        if frame >= move.last:
            return replace(one, row=move.row, column=move.column)
        gone = (frame - move.first) / (move.last - move.first)
        x = one.shift[0] + gone * (move.column - one.column)
        y = one.shift[1] + gone * (move.row - one.row)
        return replace(one, shift=(x, y))


BUNDLED_CLIP = MovingScene(  # the clip that is shown where none is given
    (
        Thing("star", "orange", "large", 0, 0, shift=(0.02, 0.03)),
        Thing("digit", "purple", "large", 1, 1, 3, shift=(0.03, -0.02)),
        Thing("ring", "green", "small", 2, 2, shift=(-0.04, 0.0)),
    ),
    (Move(0, "right", 0, 2, 4, 10), Move(2, "left", 2, 0, 16, 23)),
)


def moving_scenes(
    count: int, split: Split = "train", seed: int = 0
) -> list[tuple[MovingScene, int]]:
    """`count` moving scenes of one side of the split, each with the number it was drawn from."""
    return list(islice(endless_scenes(split, seed), count))


def endless_scenes(split: Split = "train", seed: int = 0) -> Iterator[tuple[MovingScene, int]]:
    """The same without end."""
    for number in itertools.count(
        (seed << 24) + (_HELD_OUT_NUMBERS if split == "held-out" else _NUMBERS)
    ):
        drawn = _drawn(number)
        if drawn is not None and drawn.split == split:
            yield drawn, number


def _drawn(number: int) -> MovingScene | None:
    """A moving scene; none where nothing can move as often as was wished."""
    things = sample(number).things
    generator = np.random.default_rng((number, 6))
    wished = 1 + int(generator.choice(len(_MOVER_LAW), p=_MOVER_LAW))
    movers = [int(i) for i in generator.permutation(len(things))[:wished]]
    spans = _spans(len(movers), generator)
    taken = {(t.row, t.column) for t in things}
    moves: list[Move] = []
    for thing, (first, last) in zip(movers, spans, strict=True):
        one = things[thing]
        ways = _ways((one.row, one.column), taken)
        if not ways:
            return None
        direction, (row, column) = ways[generator.integers(len(ways))]
        taken ^= {(one.row, one.column), (row, column)}
        moves.append(Move(thing, direction, row, column, first, last))
    return MovingScene(things, tuple(moves))


def _spans(count: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """When each of the moves begins and ends; some frames of rest before, between and behind."""
    lengths = generator.integers(_SHORTEST, _LONGEST + 1, count)
    rests = 1 + generator.multinomial(
        FRAMES - 2 - count - int(lengths.sum()), [1 / (count + 1)] * (count + 1)
    )
    starts = np.cumsum(rests[:-1]) + np.concatenate(([0], np.cumsum(lengths[:-1])))
    return [(int(a), int(a + n)) for a, n in zip(starts, lengths, strict=True)]


def _ways(cell: tuple[int, int], taken: set[tuple[int, int]]) -> list[tuple[str, tuple[int, int]]]:
    """Where a thing can go in a straight line without meeting another."""
    found = []
    for direction, (down, across) in _STEPS.items():
        row, column = cell[0] + down, cell[1] + across
        while 0 <= row < BOARD and 0 <= column < BOARD and (row, column) not in taken:
            found.append((direction, (row, column)))
            row, column = row + down, column + across
    return found
