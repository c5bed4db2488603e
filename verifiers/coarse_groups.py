"""Groups of tokens that may overlap are verified exactly, whichever token stands for one."""

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
    def single(cls, vocabulary: int) -> Groups:
        """Every token alone: speculative sampling."""
        alone = torch.arange(vocabulary)
        return cls(alone, alone, vocabulary, vocabulary)

    @classmethod
    def near(cls, codebook: Codebook, threshold: float) -> Groups:
        """A group around each code: those whose vectors have a cosine of at least `threshold`.

        Tokens that are no codes stay alone. Nobody is left alone at -1; above 1 everybody is.
        """
        unit = Codebook(codebook.vectors, codebook.ids, codebook.vocabulary, "normalised")
        ids, found = codebook.ids, []
        for rows in torch.arange(codebook.size, device=ids.device).split(CHUNK):
            cosine = 1 - unit.distances(rows).square() / 2
            cosine.scatter_(1, rows[:, None], torch.inf)  # in its own, whatever rounding does
            center, member = (cosine >= threshold).nonzero(as_tuple=True)
            found.append(torch.stack((rows[center], member)))
        center, member = torch.cat(found, 1)
        rest = (codebook.codes < 0).nonzero()[:, 0]
        token = torch.cat((ids[member], rest))
        group = torch.cat((ids[center], rest))
        order = token.argsort(stable=True)
        return cls(token[order], group[order], codebook.vocabulary, codebook.vocabulary)

    @cached_property
    def is_single(self) -> bool:
        """Whether every token is alone in a group, and in one only."""
        alone = self.group.bincount(minlength=self.count) <= 1
        return bool(alone.all()) and bool((self.shares == 1).all())

    @cached_property
    def shares(self) -> Tensor:  # (V,)
        """In how many groups every token is."""
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

    def spread(self, p: Tensor, weights: Tensor) -> Tensor:  # (..., V), (..., G) -> (..., V)
        """p(x), each group weighed: p(x) times the sum of w(g|x) weights(g)."""
        zero = torch.zeros_like(p)
        return p / self.shares * zero.index_add(-1, self.token, weights[..., self.group])

    def check(self, size: int) -> None:
        """Refuse distributions over another vocabulary."""
        check_vocabulary("the grouping", self.vocabulary, size, "make it for that vocabulary")


@dataclass(frozen=True, eq=False)
class CoarseGroups:
    """Accept with min(1, P(g)/Q(g)), g a group of x drawn evenly (PCG, 2025, arXiv 2511.13732).

    After a rejection a group is drawn from norm((P - Q)+) and one of its tokens as p has them. The
    distribution of the group is P, exactly: only which of its tokens stands for a group follows the
    draft. What is accepted does not depend on the group beyond its mean, so it is the mean that is
    tested. Lossy in tokens; groups of one are `Exact`, a single group emits the draft. With a point
    mass p the tokens that share groups with the target's pass. Reconstructed: how groups are made.
    """

    groups: Groups

    @property
    def lossless(self) -> bool:
        return self.groups.is_single

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:  # (...) -> (...)
        passed = ratio(self.groups.masses(p.probs), self.groups.masses(q.probs))
        mine = self.groups.table[x]
        each = passed.gather(-1, mine.clamp_min(0)).masked_fill(mine < 0, 0)
        return each.sum(-1) / self.groups.shares[x]

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        if p.hard:  # its mode is all that any group has
            return p
        wanted = self.groups.masses(p.probs)
        left = residual(wanted, self.groups.masses(q.probs))
        weights = left / wanted.clamp_min(torch.finfo(left.dtype).tiny)
        return Categorical.having(self.groups.spread(p.probs, weights))
