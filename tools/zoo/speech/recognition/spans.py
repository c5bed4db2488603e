"""Some words of a sentence, and the sound of just those.

A model that writes sentences it nearly knows by heart learns them before it learns to listen. From
short spans, which begin and end anywhere, it learns where in the sound a word is; then from longer
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

_CUT = 0.75  # share of lessons that are cut, as long as any are
_DRAWN = 512  # lessons that are sorted by length at once
_LONGEST = 8  # words of the longest span
_AROUND = 1  # frames of sound kept on either side


@dataclass(frozen=True)
class HeardSpan:
    """What is said, and what an encoder made of it.

    states: (T, D) float16. frames: of each letter, [start, stop).
    """

    states: Tensor
    text: str
    frames: tuple[tuple[int, int], ...]

    def words(self, first: int, count: int) -> HeardSpan:
        """So many words from one on; the silence beside words that are left out is left out."""
        said = self.text.split(" ")
        start = sum(len(word) + 1 for word in said[:first])
        text = " ".join(said[first : first + count])
        stop = start + len(text)
        if not text:
            return self
        begin, end = 0, len(self.states)
        if start:
            begin = max(0, min(self.frames[start - 1][1] - _AROUND, self.frames[start][0]))
        if stop < len(self.text):
            end = max(self.frames[stop][0] + _AROUND, self.frames[stop - 1][1])
        moved = tuple((a - begin, b - begin) for a, b in self.frames[start:stop])
        return HeardSpan(self.states[begin:end], text, moved)


def drawn(pool: Sequence[HeardSpan], most: int | None, generator: np.random.Generator) -> HeardSpan:
    """One of them, mostly cut to at most so many words; None = whole."""
    one = pool[int(generator.integers(len(pool)))]
    count = len(one.text.split(" "))
    if most is None or generator.random() >= _CUT:
        return one
    chosen = int(generator.integers(1, min(count, most) + 1))
    return one.words(int(generator.integers(count - chosen + 1)), chosen)


def lessons(
    pool: Sequence[HeardSpan], places: int, frames: int, growing: int, seed: int
) -> Iterator[list[HeardSpan]]:
    """Batches of spans of similar length without end.

    They grow from single words to `_LONGEST` in the first `growing` batches; then come whole
    sentences. A batch has at most so many `places`, for letters and for embeddings of so many
    `frames` of sound each.
    """
    generator, made = np.random.default_rng((seed, 6)), 0
    while True:
        most = 1 + _LONGEST * made // growing if made < growing else None
        some = [drawn(pool, most, generator) for _ in range(_DRAWN)]
        some.sort(key=lambda one: len(one.states) + generator.uniform(0, 8))
        batches, room = list[list[HeardSpan]](), 0
        for one in some:
            needed = -(-len(one.states) // frames) + len(one.text) + 1
            if needed > room:
                batches.append([])
                room = places
            batches[-1].append(one)
            room -= needed
        yield from (batches[i] for i in generator.permutation(len(batches)))
        made += len(batches)
