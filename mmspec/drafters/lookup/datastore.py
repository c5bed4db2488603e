"""A datastore of token sequences, searched for what followed the last tokens of a text.

REST (He et al. 2024, arXiv 2311.08252) sorts the suffixes of a corpus, so that all occurrences of a
sequence of tokens lie side by side and are found by bisection. Sorted suffixes of
`[5, 6, 7, -1, 6, 8, -1]`, a corpus of two sequences:

    position  3   6   0       1       4     2   5
    tokens   -1  -1   5 6 7   6 7     6 8   7   8      all that starts with 6: positions 1 and 4

NumPy alone: engines with another version of transformers import this file as well.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mmspec.errors import check_is_file, parse_json

SEPARATOR = -1  # ends every sequence
SORTED_DEPTH = 256  # tokens by which suffixes are sorted; of equal ones the order is not defined
_MAX_COUNTED = 1024  # occurrences whose next tokens are counted; of more, evenly spaced ones


@dataclass(frozen=True, eq=False)
class Datastore:
    """Token sequences, and the order of their suffixes."""

    tokens: NDArray[np.int32]  # (T,) a SEPARATOR after each sequence
    order: NDArray[np.int64]  # (T,) positions, sorted by the tokens from there on

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Datastore:
        """Sort the suffixes of sequences of token ids.

        Takes O(T log T) time for each doubling of the sorted depth, and 12 bytes a token. Raises
        ValueError for ids below 0 and where there is no sequence of two tokens.
        """
        parts: list[NDArray[np.int64]] = []
        for number, sequence in enumerate(sequences):
            ids = np.asarray(sequence)
            if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0)):
                raise ValueError(
                    f"sequence {number} of the datastore must be token ids from 0 on, not "
                    f"{sequence!s:.60}; give a list of whole numbers"
                )
            parts += [ids.astype(np.int64), np.array([SEPARATOR])]
        if max(map(len, parts), default=0) < 2:
            raise ValueError(
                "the datastore has no sequence of at least 2 tokens, so nothing follows anything; "
                "give token ids of texts like the expected outputs"
            )
        tokens = np.concatenate(parts)
        if tokens.max() > np.iinfo(np.int32).max:
            raise ValueError(f"token id {tokens.max()} does not fit in 32 bits; give smaller ids")
        return cls(tokens.astype(np.int32), _sort_suffixes(tokens))

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raises ValueError for ids that a target with `vocabulary` ids does not have."""
        largest = int(self.tokens.max())
        if largest >= vocabulary:
            raise ValueError(
                f"the datastore has token id {largest}, but the target's vocabulary has "
                f"{vocabulary}; build it with the target's tokenizer"
            )

    def continuation(
        self, text: Sequence[int], length: int, longest: int = 16, shortest: int = 2
    ) -> list[int]:
        """What most often followed the longest suffix of `text` that occurs in the datastore.

        Suffixes of `shortest` to `longest` tokens count; negative ids of the text match nothing.
        Every next token is the most frequent one after those before it; a sequence's end stops it.
        """
        assert longest + length <= SORTED_DEPTH, "suffixes are not sorted any deeper"
        low, high, depth = self._find_longest(text, longest, shortest)
        chain: list[int] = []
        while low < high and len(chain) < length:
            if high - low == 1:  # one occurrence: all the rest is its text
                start = int(self.order[low]) + depth
                rest: list[int] = self.tokens[start : start + length - len(chain)].tolist()
                return chain + (rest[: rest.index(SEPARATOR)] if SEPARATOR in rest else rest)
            occurrences = self.order[low : high : -(-(high - low) // _MAX_COUNTED)]
            following = self.tokens[occurrences + depth]  # sorted
            starts = np.flatnonzero(np.diff(following, prepend=SEPARATOR - 1))
            counts = np.diff(starts, append=len(following))
            token = int(following[starts[counts.argmax()]])
            if token == SEPARATOR:
                break
            chain.append(token)
            low, high = self._narrow(low, high, depth, token)
            depth += 1
        return chain

    def save(self, path: str | Path) -> None:
        """Write the sorted datastore, as an .npz file."""
        with Path(path).open("wb") as file:
            np.savez(file, tokens=self.tokens, order=self.order)

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """Read what `save` wrote, or JSON lines: a list of token ids each, sorted when read.

        Raises ValueError for other content.
        """
        try:
            check_is_file(Path(path))
            if Path(path).suffix != ".npz":
                lines = Path(path).read_text(encoding="utf-8").splitlines()
                return cls.of([parse_json(line) for line in lines if line.strip()])
            with np.load(path, allow_pickle=False) as content:
                tokens, order = content["tokens"], content["order"]
            if not _is_sorted(tokens, order):
                raise ValueError("order is not one of its tokens")
            return cls(tokens, order)
        except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
            raise ValueError(
                f"{path} is not a datastore ({error}); give a file written by Datastore.save, or "
                "JSON lines with a list of token ids each"
            ) from None

    def _find_longest(
        self, text: Sequence[int], longest: int, shortest: int
    ) -> tuple[int, int, int]:
        """The range of the longest suffix that occurs, and its length; bisected by length.

        Where a suffix occurs, all shorter ones do.
        """
        found, fits, fails = (0, 0, 0), shortest - 1, min(longest, len(text)) + 1
        while fails - fits > 1:
            size = (fits + fails) // 2
            low, high = self._find(text[len(text) - size :])
            if low < high:
                found, fits = (low, high, size), size
            else:
                fails = size
        return found

    def _find(self, sequence: Sequence[int]) -> tuple[int, int]:
        """The range of the suffixes that start with a sequence."""
        low, high = 0, len(self.order)
        for depth, token in enumerate(sequence):
            low, high = self._narrow(low, high, depth, token) if token >= 0 else (0, 0)
            if low == high:
                break
        return low, high

    def _narrow(self, low: int, high: int, depth: int, token: int) -> tuple[int, int]:
        """The part of a range of equal beginnings that has a token at `depth`."""
        tokens, order = self.tokens, self.order
        low = bisect_left(order, token, low, high, key=lambda start: tokens[start + depth])
        return low, bisect_right(order, token, low, high, key=lambda start: tokens[start + depth])


def check_lengths(length: int, longest: int, shortest: int) -> None:
    """Check the lengths of drafts and of suffixes to look up. Raises ValueError."""
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"shortest={shortest} must be at least 1 and at most longest={longest}; give lengths "
            "of suffixes to look up"
        )
    if longest + length > SORTED_DEPTH:
        raise ValueError(
            f"longest={longest} and a draft of {length} tokens exceed the {SORTED_DEPTH} tokens by "
            "which a datastore is sorted; give shorter ones"
        )


def _sort_suffixes(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions (T,) sorted by up to `SORTED_DEPTH` tokens (prefix doubling, Manber & Myers)."""
    total, depth = len(tokens), 1
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(rank, kind="stable")
    while depth < SORTED_DEPTH and rank.max() < total - 1:
        second = np.zeros(total, dtype=np.int64)
        second[:-depth] = rank[depth:] + 1
        key = rank * (total + 1) + second
        order = np.argsort(key, kind="stable")
        is_new = np.diff(key[order], prepend=key[order[0]]) != 0
        rank[order] = np.cumsum(is_new)
        depth *= 2
    return order


def _is_sorted(tokens: NDArray[np.int32], order: NDArray[np.int64]) -> bool:
    """Whether `order` has every position once, in the order of first tokens."""
    if tokens.ndim != 1 or len(tokens) < 3 or order.shape != tokens.shape:
        return False
    if tokens.dtype != np.int32 or order.dtype != np.int64 or tokens[-1] != SEPARATOR:
        return False
    is_position = np.array_equal(np.sort(order), np.arange(len(tokens)))
    return is_position and bool((np.diff(tokens[order]) >= 0).all())
