"""Bigram counts as a distribution of transitions, and the best path through candidate tokens."""

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

    `table` (P, 3) int holds a token, the next one and their count; missing pairs have count 0.
    Raises ValueError at construction for tokens outside the vocabulary, a duplicate pair, and an
    `alpha` that leaves transitions impossible.
    """

    table: Tensor
    vocabulary: int
    alpha: float = 0.01

    def __post_init__(self) -> None:
        pairs = self.table[:, :2]
        if len(pairs) and not 0 <= int(pairs.amin()) <= int(pairs.amax()) < self.vocabulary:
            raise ValueError(
                f"the counts contain tokens {int(pairs.amin())} to {int(pairs.amax())}, but the "
                f"vocabulary has {self.vocabulary}; count the text of this target"
            )
        if len(self._keys.unique()) < len(pairs):
            raise ValueError("a pair of tokens is counted twice; add its counts up")
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha} makes unseen pairs impossible; give more than 0")

    @staticmethod
    def count_pairs(rows: Iterable[Sequence[int]]) -> Tensor:  # (P, 3) int32
        """Count the pairs of adjacent tokens in rows, sorted by pair."""
        pairs = [pair for row in rows for pair in pairwise(row)]
        if not pairs:
            return torch.zeros(0, 3, dtype=torch.int32)
        found, count = torch.tensor(pairs).unique(dim=0, return_counts=True)
        return torch.cat((found, count[:, None]), 1).int()

    def log_prob(self, first: Tensor, second: Tensor) -> Tensor:  # (...), (...) -> (...)
        """log A(first, second)."""
        key = first * self.vocabulary + second
        total = self._totals[first]
        keys, counts = self._sorted_pairs
        place = torch.searchsorted(keys, key)
        count = torch.where(keys[place] == key, counts[place], 0)
        return ((count + self.alpha) / (total + self.alpha * self.vocabulary)).log()

    @cached_property
    def _keys(self) -> Tensor:  # (P,)
        first, second, _ = self.table.long().unbind(1)
        return first * self.vocabulary + second

    @cached_property
    def _sorted_pairs(self) -> tuple[Tensor, Tensor]:  # (P + 1,), (P + 1,); the last is padding
        keys, order = self._keys.sort()
        counts = self.table[order, 2].float()
        beyond = keys.new_full((1,), torch.iinfo(torch.int64).max)
        return torch.cat((keys, beyond)), functional.pad(counts, (0, 1))

    @cached_property
    def _totals(self) -> Tensor:  # (V,)
        first, count = self.table[:, 0].long(), self.table[:, 2].float()
        return count.new_zeros(self.vocabulary).index_add_(0, first, count)


def best_path(
    scores: Tensor, first: Tensor, bigrams: Bigrams | None, width: int, weight: float
) -> Tensor:  # (B, n, V), (B,) -> (B, n)
    """The tokens c that maximise sum_i [scores_i(c_i) + weight log A(c_(i-1), c_i)], c_0 = `first`.

    Viterbi over the `width` best tokens of each position (Codec-MTP, Nguyen et al. 2025; the score
    is reconstructed). O(n width^2) instead of O(n V^2), and exact at width V; a constant added to
    the scores of a position changes nothing. Without `bigrams` positions are independent.
    """
    best, token = scores.topk(min(width, scores.shape[-1]), -1)  # (B, n, k) each
    before, total = first[:, None], best.new_zeros(len(best), 1)
    parents: list[Tensor] = []
    for place in range(scores.shape[1]):
        here = token[:, place]
        ways = total[:, :, None].expand(-1, -1, here.shape[1])  # (B, k', k)
        if bigrams is not None:
            step = bigrams.log_prob(before[:, :, None], here[:, None, :])
            ways = ways + weight * step
        total, chosen = ways.max(1)
        total = total + best[:, place]
        parents.append(chosen)
        before = here
    at = total.argmax(-1, keepdim=True)
    path = []
    for place in reversed(range(scores.shape[1])):
        path.append(token[:, place].gather(1, at))
        at = parents[place].gather(1, at)
    return torch.cat(path[::-1], 1)
