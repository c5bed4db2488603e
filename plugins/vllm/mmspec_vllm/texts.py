"""The texts of a batch, and what a drafter knows of each from earlier steps.

vLLM gives a custom proposer a table of token ids without request ids, and rows move when requests
join, leave or are preempted. What our drafters know of a request depends on its tokens alone, so
the tokens identify it: a text is that of a row if it is a prefix of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

IGNORED = -1  # stands for ids that are neither matched nor proposed

# Steps that a text is kept without a row. With pipeline parallelism batches alternate, and a
# request may be left out of a step when tokens are short; its index would be built again.
PATIENCE = 16


class TextReader(Protocol):
    """What is built from one growing text."""

    def read(self, text: Sequence[int]) -> None:
        """Add the tokens since the last call."""


class Unread:
    """For drafters that need the tokens of a text alone."""

    def read(self, text: Sequence[int]) -> None: ...


R = TypeVar("R", bound=TextReader)


class Text(Generic[R]):
    """The tokens of a request read so far."""

    def __init__(self, index: R) -> None:
        self.index = index
        self.tokens: list[int] = []  # with IGNORED
        self.seen = 0  # the last step with it
        self._ids = np.empty(64, dtype=np.int32)  # as vLLM holds them; grows by doubling

    def is_prefix_of(self, ids: NDArray[np.int32]) -> bool:
        """Whether a row (L,) continues this text."""
        size = len(self.tokens)
        if size > len(ids) or self._ids[size - 1] != ids[size - 1]:
            return False
        return np.array_equal(self._ids[:size], ids[:size])

    def read(self, ids: NDArray[np.int32], is_ignored: Callable[[int], bool]) -> None:
        """Add what a row (L,) has beyond this text."""
        start, size = len(self.tokens), len(ids)
        if size > len(self._ids):
            grown = np.empty(max(size, 2 * len(self._ids)), dtype=np.int32)
            grown[:start] = self._ids[:start]
            self._ids = grown
        self._ids[start:size] = ids[start:]
        self.tokens += [IGNORED if is_ignored(token) else token for token in ids[start:].tolist()]
        self.index.read(self.tokens)


class Texts(Generic[R]):
    """The texts of a running batch.

    At most `limit` texts are kept beside those of the batch, each for at most `PATIENCE` steps.
    """

    def __init__(
        self, create_index: Callable[[], R], is_ignored: Callable[[int], bool], limit: int
    ) -> None:
        self.create_index, self.is_ignored, self.limit = create_index, is_ignored, limit
        self.step = 0
        self.by_row: dict[int, Text[R]] = {}
        self.waiting: list[Text[R]] = []  # without a row in the last step

    def match(self, rows: Mapping[int, NDArray[np.int32]]) -> dict[int, Text[R]]:
        """The text of each row (L,), read to its end."""
        self.step += 1
        known = self.by_row
        found = {
            row: known[row]
            for row, ids in rows.items()
            if row in known and known[row].is_prefix_of(ids)
        }
        rest = [*self.waiting, *(text for row, text in known.items() if row not in found)]
        for row in [row for row in rows if row not in found]:
            fitting = [text for text in rest if text.is_prefix_of(rows[row])]
            text = max(fitting, key=lambda one: len(one.tokens), default=None)
            if text is not None:
                rest.remove(text)
            found[row] = Text(self.create_index()) if text is None else text
        for row, text in found.items():
            text.read(rows[row], self.is_ignored)
            text.seen = self.step
        self.by_row = found
        recent = [text for text in rest if self.step - text.seen < PATIENCE]
        self.waiting = recent[-self.limit :]
        return found
