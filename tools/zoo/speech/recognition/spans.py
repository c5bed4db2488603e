"""Spans of words with the corresponding encoder states.

A decoder trained on whole sentences of a small world learns the sentences before it attends to the
audio. From short spans, which begin and end anywhere, it learns the positions of words first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

_CUT = 0.75  # share of examples that are cut in the growing phase
_SORTED = 512  # examples sorted by length at once
_MAX_WORDS = 8  # of a span
_CONTEXT = 1  # frames of audio around a span


@dataclass(frozen=True)
class AlignedSpan:
    """A text and its encoder states.

    states: (T, D) float16. frames: of each letter, [start, stop).
    """

    states: Tensor
    text: str
    frames: tuple[tuple[int, int], ...]

    def slice_words(self, first: int, count: int) -> AlignedSpan:
        """`count` words from word `first`, without the audio of other words."""
        words = self.text.split(" ")
        start = sum(len(word) + 1 for word in words[:first])
        text = " ".join(words[first : first + count])
        stop = start + len(text)
        if not text:
            return self
        begin, end = 0, len(self.states)
        if start:
            begin = max(0, min(self.frames[start - 1][1] - _CONTEXT, self.frames[start][0]))
        if stop < len(self.text):
            end = max(self.frames[stop][0] + _CONTEXT, self.frames[stop - 1][1])
        frames = tuple((a - begin, b - begin) for a, b in self.frames[start:stop])
        return AlignedSpan(self.states[begin:end], text, frames)


def sample_span(
    pool: Sequence[AlignedSpan], max_words: int | None, generator: np.random.Generator
) -> AlignedSpan:
    """A random example, mostly cut to at most `max_words`; None = whole."""
    one = pool[int(generator.integers(len(pool)))]
    count = len(one.text.split(" "))
    if max_words is None or generator.random() >= _CUT:
        return one
    chosen = int(generator.integers(1, min(count, max_words) + 1))
    return one.slice_words(int(generator.integers(count - chosen + 1)), chosen)


def batch_spans(
    pool: Sequence[AlignedSpan], max_positions: int, frames: int, growing: int, seed: int
) -> Iterator[list[AlignedSpan]]:
    """Endless batches of spans of similar length.

    They grow from single words to `_MAX_WORDS` in the first `growing` batches; whole sentences
    follow. A batch has at most `max_positions` letters and audio embeddings, of `frames` each.
    """
    generator, made = np.random.default_rng((seed, 6)), 0
    while True:
        max_words = 1 + _MAX_WORDS * made // growing if made < growing else None
        spans = [sample_span(pool, max_words, generator) for _ in range(_SORTED)]
        spans.sort(key=lambda one: len(one.states) + generator.uniform(0, 8))
        batches, remaining = list[list[AlignedSpan]](), 0
        for one in spans:
            required = -(-len(one.states) // frames) + len(one.text) + 1
            if required > remaining:
                batches.append([])
                remaining = max_positions
            batches[-1].append(one)
            remaining -= required
        yield from (batches[i] for i in generator.permutation(len(batches)))
        made += len(batches)
