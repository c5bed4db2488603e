"""Phrases: frequent runs of image tokens, found by byte-pair merging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmspec.errors import check_is_file

Phrase = tuple[int, ...]


@dataclass(frozen=True)
class Phrases:
    """A library of phrases of two or more tokens, with the count of each merge."""

    counts: Mapping[Phrase, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for phrase in self.counts:
            if len(phrase) < 2 or min(phrase) < 0:
                raise ValueError(
                    f"{phrase} is not a phrase; a phrase has two token ids or more, all from 0 up"
                )

    @classmethod
    def build(
        cls, rows: Iterable[Sequence[int]], merges: int = 1000, longest: int = 4, min_count: int = 2
    ) -> Phrases:
        """Merge the most frequent neighbours, one pair after the other (byte-pair encoding).

        `rows` are grid rows (or whole texts): no phrase crosses the end of one. A merge creates a
        phrase of at most `longest` tokens from two neighbours that occur `min_count` times or more;
        of equally frequent pairs the one with the smallest ids comes first. At most `merges`
        phrases.
        """
        if longest < 2 or min_count < 1 or merges < 0:
            raise ValueError(
                f"longest={longest}, min_count={min_count}, merges={merges}: give at least "
                "2 tokens, 1 occurrence and 0 merges"
            )
        texts: list[list[Phrase]] = [[(token,) for token in row] for row in rows]
        found: dict[Phrase, int] = {}
        for _ in range(merges):
            pairs = Counter(
                pair
                for text in texts
                for pair in pairwise(text)
                if len(pair[0] + pair[1]) <= longest
            )
            if not pairs:
                break
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            if pairs[best] < min_count:
                break
            found[best[0] + best[1]] = max(found.get(best[0] + best[1], 0), pairs[best])
            texts = [_merge_pair(text, best) for text in texts]
        return cls(found)

    @property
    def longest(self) -> int:
        """Tokens of the longest phrase; 0 for an empty library."""
        return max(map(len, self.counts), default=0)

    def __len__(self) -> int:
        return len(self.counts)

    def save(self, file: str | Path) -> None:
        """Write the library as safetensors."""
        tokens = torch.full((len(self), self.longest), -1)
        for place, phrase in enumerate(self.counts):
            tokens[place, : len(phrase)] = torch.tensor(phrase)
        counts = torch.tensor(list(self.counts.values()), dtype=torch.int64)
        save_file({"tokens": tokens, "counts": counts}, str(file))

    @classmethod
    def load(cls, file: str | Path) -> Phrases:
        """Read a library written by `save`. Raises ValueError for another file."""
        try:
            check_is_file(Path(file))
            saved = load_file(str(file))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} cannot be read as a phrase library ({error}); make one with "
                "Phrases.build(...).save(file)"
            ) from error
        if set(saved) != {"tokens", "counts"}:
            raise ValueError(
                f"{file} holds {', '.join(sorted(saved))}, not tokens and counts; it is not a "
                "phrase "
                "library, make one with Phrases.build(...).save(file)"
            )
        rows = zip(saved["tokens"].tolist(), saved["counts"].tolist(), strict=True)
        return cls({tuple(t for t in row if t >= 0): count for row, count in rows})


@dataclass(frozen=True)
class Trie:
    """A library as a table of edges, traversed for many positions at once."""

    size: int  # vocabulary
    keys: Tensor  # (E,) int64 sorted, state * size + token
    states: Tensor  # (E,) int64 the state each edge leads to
    ends: Tensor  # (S,) bool, whether a phrase ends in the state
    longest: int

    @classmethod
    def build(cls, phrases: Phrases, size: int, device: torch.device) -> Trie:
        """Build from phrases. Raises ValueError for tokens outside a vocabulary of `size`."""
        edges: dict[tuple[int, int], int] = {}
        ends = {0: False}
        for phrase in phrases.counts:
            if max(phrase) >= size:
                raise ValueError(
                    f"phrase {phrase} has a token outside the vocabulary of {size}; the library "
                    "was made for another model"
                )
            state = 0
            for token in phrase:
                state = edges.setdefault((state, token), len(ends))
                ends.setdefault(state, False)
            ends[state] = True
        ordered = sorted((state * size + token, to) for (state, token), to in edges.items())
        table = torch.tensor(ordered, dtype=torch.int64, device=device).reshape(-1, 2)
        flags = torch.tensor([ends[state] for state in range(len(ends))], device=device)
        keys, states = table.t().contiguous().unbind(0)
        return cls(size, keys, states, flags, phrases.longest)

    def matches(
        self, tokens: Tensor, allowed: Tensor, max_length: Tensor | None = None
    ) -> Tensor:  # (B, N) x3 -> (B, N)
        """The length of the longest phrase that begins at each position, 0 = none.

        All its tokens must be `allowed`, and it has at most `max_length` tokens.
        """
        found = torch.zeros_like(tokens)
        if not len(self.keys):
            return found
        state, alive = torch.zeros_like(tokens), torch.ones_like(allowed)
        for step in range(min(self.longest, tokens.shape[1])):
            here = tokens.roll(-step, 1)
            inside = torch.arange(tokens.shape[1], device=tokens.device) + step < tokens.shape[1]
            key = state * self.size + here
            place = torch.searchsorted(self.keys, key).clamp_max(len(self.keys) - 1)
            alive = alive & inside & allowed.roll(-step, 1) & (self.keys[place] == key)
            alive = alive if max_length is None else alive & (step < max_length)
            state = torch.where(alive, self.states[place], state)
            found = torch.where(alive & self.ends[state], step + 1, found)
        return found


def _merge_pair(text: list[Phrase], pair: tuple[Phrase, Phrase]) -> list[Phrase]:
    """The text with every occurrence of the pair, from the left, merged to one phrase."""
    merged: list[Phrase] = []
    for piece in text:
        if merged and (merged[-1], piece) == pair:
            merged[-1] = pair[0] + pair[1]
        else:
            merged.append(piece)
    return merged
