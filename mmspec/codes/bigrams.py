"""Which token follows which: counts of neighbours in a text, as a distribution of transitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, eq=False)
class Bigrams:
    """Additively smoothed transitions: A(c, d) = (n(c, d) + alpha) / (n(c) + alpha V).

    `table` (P, 3) int holds a token, the next one and how often; pairs that it lacks were never
    seen. Raises ValueError at construction for tokens outside the vocabulary, a pair that is there
    twice, and an `alpha` that leaves transitions impossible.
    """

    table: Tensor
    vocabulary: int
    alpha: float = 0.01

    def __post_init__(self) -> None:
        pairs = self.table[:, :2]
        if len(pairs) and not 0 <= int(pairs.amin()) <= int(pairs.amax()) < self.vocabulary:
            raise ValueError(
                f"the counts speak of tokens {int(pairs.amin())} to {int(pairs.amax())}, but the "
                f"vocabulary has {self.vocabulary}; count the text of this target"
            )
        if len(self._keys.unique()) < len(pairs):
            raise ValueError("a pair of tokens is counted twice; add its counts up")
        if not self.alpha > 0:
            raise ValueError(
                f"alpha={self.alpha} makes what was not seen impossible; give more than 0"
            )

    @staticmethod
    def counted(rows: Iterable[Sequence[int]]) -> Tensor:  # (P, 3) int32
        """Count the neighbours in rows of tokens, sorted by pair."""
        pairs = [pair for row in rows for pair in pairwise(row)]
        if not pairs:
            return torch.zeros(0, 3, dtype=torch.int32)
        found, count = torch.tensor(pairs).unique(dim=0, return_counts=True)
        return torch.cat((found, count[:, None]), 1).int()

    def log_prob(self, first: Tensor, second: Tensor) -> Tensor:  # (...), (...) -> (...)
        """log A(first, second)."""
        wanted = first * self.vocabulary + second
        seen = self._totals[first]
        keys, counts = self._sorted
        place = torch.searchsorted(keys, wanted)
        count = torch.where(keys[place] == wanted, counts[place], 0)
        return ((count + self.alpha) / (seen + self.alpha * self.vocabulary)).log()

    @cached_property
    def _keys(self) -> Tensor:  # (P,)
        first, second, _ = self.table.long().unbind(1)
        return first * self.vocabulary + second

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:  # (P + 1,), (P + 1,); the last is no pair
        keys, order = self._keys.sort()
        counts = self.table[order, 2].float()
        beyond = keys.new_full((1,), torch.iinfo(torch.int64).max)
        return torch.cat((keys, beyond)), functional.pad(counts, (0, 1))

    @cached_property
    def _totals(self) -> Tensor:  # (V,)
        first, count = self.table[:, 0].long(), self.table[:, 2].float()
        return count.new_zeros(self.vocabulary).index_add_(0, first, count)
