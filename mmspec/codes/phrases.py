"""Phrases: runs of picture tokens that occur together often, found by merging frequent pairs."""

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

Phrase = tuple[int, ...]


@dataclass(frozen=True)
class Phrases:
    """A library of phrases of two tokens or more, with how often each was merged."""

    counts: Mapping[Phrase, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for phrase in self.counts:
            if len(phrase) < 2 or min(phrase) < 0:
                raise ValueError(
                    f"{phrase} is no phrase; a phrase has two token ids or more, all from 0 up"
                )

    @classmethod
    def build(
        cls, rows: Iterable[Sequence[int]], merges: int = 1000, longest: int = 4, least: int = 2
    ) -> Phrases:
        """Merge the most frequent neighbours, one pair after the other (byte-pair encoding).

        `rows` are grid rows (or whole texts): no phrase goes beyond the end of one. A merge makes
        a phrase of at most `longest` tokens out of two neighbours that occur `least` times or
        more; of equally frequent pairs the smallest ids go first. At most `merges` phrases.
        """
        if longest < 2 or least < 1 or merges < 0:
            raise ValueError(
                f"longest={longest}, least={least}, merges={merges}: give 2 tokens or more, 1 "
                "occurrence or more, 0 merges or more"
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
            if pairs[best] < least:
                break
            found[best[0] + best[1]] = max(found.get(best[0] + best[1], 0), pairs[best])
            texts = [_merged(text, best) for text in texts]
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
        """Read what `save` wrote. Raises ValueError for a file that is none."""
        try:
            saved = load_file(str(file))
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"{file} cannot be read as a phrase library ({error}); make one with "
                "Phrases.build(...).save(file)"
            ) from error
        if set(saved) != {"tokens", "counts"}:
            raise ValueError(
                f"{file} holds {', '.join(sorted(saved))}, not tokens and counts; it is no phrase "
                "library, make one with Phrases.build(...).save(file)"
            )
        rows = zip(saved["tokens"].tolist(), saved["counts"].tolist(), strict=True)
        return cls({tuple(t for t in row if t >= 0): count for row, count in rows})


@dataclass(frozen=True)
class Trie:
    """A library as a table of edges, walked for many places at once."""

    size: int  # vocabulary
    keys: Tensor  # (E,) int64 sorted, state * size + token
    states: Tensor  # (E,) int64 the state each edge leads to
    ends: Tensor  # (S,) bool, whether a phrase ends in the state
    longest: int

    @classmethod
    def of(cls, phrases: Phrases, size: int, device: torch.device) -> Trie:
        """Raises ValueError for tokens outside a vocabulary of `size`."""
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
        self, tokens: Tensor, allowed: Tensor, room: Tensor | None = None
    ) -> Tensor:  # (B, N) x3 -> (B, N)
        """Length of the longest phrase that begins at each place, 0 = none.

        All its tokens must be `allowed`, and no more than there is `room` for.
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
            alive = alive if room is None else alive & (step < room)
            state = torch.where(alive, self.states[place], state)
            found = torch.where(alive & self.ends[state], step + 1, found)
        return found


def _merged(text: list[Phrase], pair: tuple[Phrase, Phrase]) -> list[Phrase]:
    """The text with every occurrence of the pair, from the left, as one phrase."""
    made: list[Phrase] = []
    for piece in text:
        if made and (made[-1], piece) == pair:
            made[-1] = pair[0] + pair[1]
        else:
            made.append(piece)
    return made
