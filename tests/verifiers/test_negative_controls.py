"""Wrong verifiers must fail the distribution test, by their known bias.

The list and the biased distributions are those of methods/foundations.md, sections 2 and 11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction as F
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.block import Block, path_ratio, scaled_residual, stopping_probability
from mmspec.verifiers.enumeration import ancestral_joint, enumerate_emitted, enumerate_joint
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.walk import Siblings, descend, gather_token


def vector(*parts: str) -> Tensor:
    return torch.tensor([float(F(part)) for part in parts], dtype=torch.float64)


E1 = (vector("1/2", "3/10", "1/5"), vector("1/5", "1/2", "3/10"))
E2 = (vector("0.40", "0.35", "0.15", "0.10"), vector("0.10", "0.20", "0.40", "0.30"))
E4 = (vector("0.60", "0.25", "0.10", "0.05"), vector("0.30", "0.40", "0.20", "0.10"))


class FromP(Exact):
    """Wrong: corrects from p instead of the residual."""

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


@dataclass(frozen=True)
class ChangedDraft(Verifier):
    """A correct verifier that gets a draft with a wrong label."""

    change: Callable[[Draft], Draft]
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = tuple(Kind)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        return Recursive().verify(self.change(draft), scores, noise)


def label_as(kind: Kind, q: Tensor) -> ChangedDraft:
    """Claims that deterministic tokens were sampled from q as `kind`."""
    return ChangedDraft(
        lambda d: replace(
            d, kind=kind, distribution=Categorical.from_weights(q.expand(*d.tokens.shape, -1))
        )
    )


def dropping(q: Tensor, least: float) -> ChangedDraft:
    """Drops sampled tokens because of their own probability."""
    return ChangedDraft(lambda d: replace(d, mask=q[d.tokens] >= least))


@dataclass(frozen=True)
class SkipDuplicates(Verifier):
    """Wrong: a second copy of a rejected sibling is passed over."""

    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        def step(family: Siblings, noise: Noise, lane: int) -> tuple[Tensor, Tensor]:
            p, q, slot = family.p, family.q, torch.full_like(family.last, -1)
            for j, x in enumerate(family.tokens.unbind(1)):
                known = (family.tokens[:, :j] == x[:, None]).any(-1)
                tested = family.real[:, j] & (slot < 0) & ~known
                chance = torch.where(tested, Exact().accept(p, q, x), 0)
                hit = noise.flip(chance, lane + j)
                slot = torch.where(hit, j, slot)
                p = Categorical.where(tested & ~hit, p.residual(q), p)
            return slot, p.probs

        return descend(draft, scores, noise, step)


@dataclass(frozen=True)
class WrongBlock(Verifier):
    """Block verification with one of two known mistakes, or with none."""

    scaled: bool = True  # False: residual without rho
    longest: bool = True  # False: stops at the first failure
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        p, q = as_categorical(scores.distribution).probs, as_categorical(draft.distribution).probs
        gamma, batch = draft.nodes, torch.arange(draft.batch)
        rho = path_ratio(gather_token(p[:, :-1], draft.tokens), gather_token(q, draft.tokens))
        left = (rho[:, 1:-1, None] * p[:, 1:-1] - q[:, 1:]).clamp_min(0).sum(-1)
        passing = torch.cat([stopping_probability(left, rho[:, 1:-1]), rho[:, -1:]], -1)
        hits = noise.flip(passing, Lane.ACCEPT)
        index = torch.arange(1, gamma + 1)
        length = (hits * index).amax(-1) if self.longest else hits.cumprod(-1).sum(-1)
        scale = rho[batch, length] if self.scaled else torch.ones(draft.batch).double()
        after = scaled_residual(p[batch, length], q[batch, length.clamp_max(gamma - 1)], scale)
        weights = torch.where((length < gamma)[:, None], after, p[:, -1])
        path = torch.where(index <= length[:, None], index - 1, -1)
        return Verdict(path, length, noise.pick(weights, Lane.RESIDUAL))


WRONG: list[tuple[Verifier, tuple[Tensor, Tensor], int, Kind, tuple[str, ...]]] = [
    (Recursive(FromP()), E1, 1, Kind.IID, ("7/20", "39/100", "13/50")),
    (label_as(Kind.IID, E1[1]), E1, 1, Kind.DET, ("2/5", "3/5", "0")),
    (label_as(Kind.WOR, E1[1]), E1, 2, Kind.DET, ("2/5", "3/5", "0")),
    (label_as(Kind.WOR, E2[1]), E2, 2, Kind.DET, ("5/8", "0", "3/8", "0")),
    (SkipDuplicates(), E2, 2, Kind.IID, ("66/175", "261/700", "3/20", "1/10")),
    (label_as(Kind.IID, E2[1]), E2, 2, Kind.WOR, ("107/294", "227/588", "3/20", "1/10")),
    (dropping(E1[1], 0.25), E1, 1, Kind.IID, ("0.40", "0.36", "0.24")),
    (dropping(E2[1], 0.15), E2, 1, Kind.IID, ("0.34", "0.385", "0.165", "0.11")),
]


@pytest.mark.parametrize(("verifier", "pair", "siblings", "kind", "biased"), WRONG)
def test_a_wrong_verifier_has_its_known_bias(
    verifier: Verifier,
    pair: tuple[Tensor, Tensor],
    siblings: int,
    kind: Kind,
    biased: tuple[str, ...],
) -> None:
    found = enumerate_emitted(*pair, verifier, siblings, kind)
    assert_close(found, vector(*biased), atol=1e-12, rtol=0)
    with pytest.raises(AssertionError):
        assert_close(found, pair[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pair", [E1, E4])
def test_skipped_duplicates_hide_where_the_residual_has_one_token(
    pair: tuple[Tensor, Tensor],
) -> None:
    assert_close(
        enumerate_emitted(*pair, SkipDuplicates(), 2, Kind.IID), pair[0], atol=1e-12, rtol=0
    )


def test_wrong_q_without_replacement_hides_on_the_first_oracle() -> None:
    assert_close(
        enumerate_emitted(*E1, label_as(Kind.IID, E1[1]), 2, Kind.WOR), E1[0], atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("gamma", [2, 3])
@pytest.mark.parametrize("pair", [E1, E2], ids=["E1", "E2"])
def test_wrong_blocks_fail_beyond_the_first_token(pair: tuple[Tensor, Tensor], gamma: int) -> None:
    tree, expected = Tree.chain(gamma), ancestral_joint(pair[0], gamma + 1)
    right = enumerate_joint(*pair, WrongBlock(), tree, Kind.IID)
    assert_close(right, expected, atol=1e-12, rtol=0)
    assert_close(right, enumerate_joint(*pair, Block(), tree, Kind.IID), atol=1e-12, rtol=0)
    early = enumerate_joint(*pair, WrongBlock(longest=False), tree, Kind.IID)
    assert (early - expected).abs().max() > 1e-3
    unscaled = enumerate_joint(*pair, WrongBlock(scaled=False), tree, Kind.IID)
    if pair is E1:  # its residual has one token, scaled or not
        assert_close(unscaled, expected, atol=1e-12, rtol=0)
    else:
        assert (unscaled - expected).abs().max() > 1e-3
