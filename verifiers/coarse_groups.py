"""Exact verification of overlapping token groups instead of tokens (PCG)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from mmspec.codes.codebook import CHUNK, Codebook
from mmspec.distributions.categorical import Categorical, residual
from mmspec.errors import check_vocabulary
from mmspec.verifiers.walk import ratio


@dataclass(frozen=True, eq=False)
class Groups:
    """G groups of V tokens as pairs (token, group); a token's mass is split evenly over its groups.

    Raises ValueError for a token without a group.
    """

    token: Tensor = field(repr=False)  # (n,) int64, ascending
    group: Tensor = field(repr=False)  # (n,) int64
    vocabulary: int  # V
    count: int  # G

    def __post_init__(self) -> None:
        if bool((self.shares == 0).any()):
            alone = int((self.shares == 0).nonzero()[0])
            raise ValueError(f"token {alone} is in no group; give it one of its own")

    @classmethod
    def singletons(cls, vocabulary: int) -> Groups:
        """One group per token: speculative sampling."""
        alone = torch.arange(vocabulary)
        return cls(alone, alone, vocabulary, vocabulary)

    @classmethod
    def around_codes(cls, codebook: Codebook, threshold: float) -> Groups:
        """A group around each code: the codes with a cosine of at least `threshold` to it.

        Tokens that are no codes form groups of one. -1 puts every code into every group; above 1
        every group has one token.
        """
        unit = Codebook(codebook.vectors, codebook.ids, codebook.vocabulary, "normalised")
        ids, found = codebook.ids, []
        for rows in torch.arange(codebook.size, device=ids.device).split(CHUNK):
            cosine = (1 - unit.distances(rows).square() / 2).clamp_min(-1)  # despite rounding
            cosine.scatter_(1, rows[:, None], torch.inf)  # in its own group, likewise
            center, member = (cosine >= threshold).nonzero(as_tuple=True)
            found.append(torch.stack((rows[center], member)))
        center, member = torch.cat(found, 1)
        rest = (codebook.codes < 0).nonzero()[:, 0]
        token = torch.cat((ids[member], rest))
        group = torch.cat((ids[center], rest))
        order = token.argsort(stable=True)
        return cls(token[order], group[order], codebook.vocabulary, codebook.vocabulary)

    @cached_property
    def is_singletons(self) -> bool:
        """Whether every token is alone in exactly one group."""
        alone = self.group.bincount(minlength=self.count) <= 1
        return bool(alone.all()) and bool((self.shares == 1).all())

    @cached_property
    def shares(self) -> Tensor:  # (V,)
        """The number of groups of every token."""
        return self.token.bincount(minlength=self.vocabulary)

    @cached_property
    def table(self) -> Tensor:  # (V, K) the groups of every token, -1 padded
        first = self.shares.cumsum(0) - self.shares
        place = torch.arange(len(self.token), device=self.token.device) - first[self.token]
        table = self.token.new_full((self.vocabulary, int(self.shares.max())), -1)
        return table.index_put((self.token, place), self.group)

    def masses(self, p: Tensor) -> Tensor:  # (..., V) -> (..., G)
        """P(g), the sum of p(x) w(g|x)."""
        self.check(p.shape[-1])
        zero = p.new_zeros(*p.shape[:-1], self.count)
        return zero.index_add(-1, self.group, (p / self.shares)[..., self.token])

    def spread_mass(self, p: Tensor, weights: Tensor) -> Tensor:  # (..., V), (..., G) -> (..., V)
        """p(x) times the sum of w(g|x) weights(g) over the groups of x."""
        zero = torch.zeros_like(p)
        return p / self.shares * zero.index_add(-1, self.token, weights[..., self.group])

    def check(self, size: int) -> None:
        """Raise ValueError for distributions over another vocabulary."""
        check_vocabulary("the grouping", self.vocabulary, size, "make it for that vocabulary")


@dataclass(frozen=True, eq=False)
class CoarseGroups:
    """Accept with min(1, P(g)/Q(g)), g a group of x drawn evenly (PCG, 2025, arXiv 2511.13732).

    After a rejection a group is sampled from norm((P - Q)+), and one of its tokens in proportion to
    p. The distribution of the group is exactly P; the token within a group follows the draft. The
    acceptance is the mean over the groups of x. Lossy in tokens; groups of one are `Exact`, a
    single group emits the draft. With a point mass p the tokens that share a group with the
    target's pass. Reconstructed: how groups are made.
    """

    groups: Groups

    @property
    def lossless(self) -> bool:
        return self.groups.is_singletons

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        passed = ratio(self.groups.masses(p.probs), self.groups.masses(q.probs))
        mine = self.groups.table[x]
        each = passed.gather(-1, mine.clamp_min(0)).masked_fill(mine < 0, 0)
        return each.sum(-1) / self.groups.shares[x]

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        if p.hard:  # all mass is on the mode
            return p
        wanted = self.groups.masses(p.probs)
        left = residual(wanted, self.groups.masses(q.probs))
        weights = left / wanted.clamp_min(torch.finfo(left.dtype).tiny)
        return Categorical.from_probs(self.groups.spread_mass(p.probs, weights))
