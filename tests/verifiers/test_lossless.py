"""Every lossless verifier reproduces the target's joint distribution, for any draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.block import Block
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_emitted,
    enumerate_joint,
    enumerate_rounds,
    expected_accepted,
)
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.kseq import KSeq
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.multi_draw import MultiDraw
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.spechub import SpecHub
from mmspec.verifiers.traversal import Traversal
from mmspec.verifiers.two_step import TwoStep
from mmspec.verifiers.typical import Typical
from tests.verifiers.parts import ALL
from tests.verifiers.random_distributions import by_prefix

LOSSLESS = [v for v in ALL if v.lossless and not isinstance(v, Coupled)]
GREEDY = [  # relaxed rules that leave greedy decoding alone, which not all do
    Recursive(Lenience(ell=0.8)),
    Recursive(Annealed(delta=1.5)),
    Recursive(Grouped(RankWindow(size=4))),
    Longest(Typical(epsilon=0.09, delta=0.3)),
    MultiDraw(draws=3),
]
PAIRS = [(v, kind) for v in LOSSLESS for kind in v.kinds if kind is not Kind.RACE]
UNEVEN = Tree((-1, -1, 0, 1, 1, 2))  # two children, of which the second has two
TREES = [Tree.chain(3), Tree.branching([2]), Tree.branching([3]), Tree.branching([2, 1]), UNEVEN]


def accepts(verifier: Verifier, tree: Tree) -> bool:
    if isinstance(verifier, SpecHub | TwoStep):
        return tree.width <= 2
    return tree.is_chain or verifier.uses_trees


CASES = [(v, kind, tree) for v, kind in PAIRS for tree in TREES if accepts(v, tree)]


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 10), marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize(("verifier", "kind", "tree"), CASES, ids=str)
def test_the_joint_distribution_is_the_target_s(
    verifier: Verifier, kind: Kind, tree: Tree, seeds: range
) -> None:
    for seed in seeds:
        p, q = by_prefix(seed), by_prefix(seed + 1000)
        found = enumerate_joint(p, q, verifier, tree, kind)
        assert_close(found, ancestral_joint(p, tree.depth + 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("verifier", "kind"), PAIRS, ids=str)
def test_padding_and_separate_topologies_change_no_distribution(
    verifier: Verifier, kind: Kind
) -> None:
    tree = UNEVEN if verifier.uses_trees else Tree.chain(3)
    padded = (2,) if tree.is_chain else (4, 5)  # the second child of a node, and a leaf
    p, q = by_prefix(1), by_prefix(2)
    expected = ancestral_joint(p, tree.depth + 1)
    assert_close(
        enumerate_joint(p, q, AlteredVerifier(verifier, padded), tree, kind),
        expected,
        atol=1e-12,
        rtol=0,
    )
    if not isinstance(verifier, Block | Traversal):
        ragged = AlteredVerifier(verifier, padded, ragged=True)
        assert_close(enumerate_joint(p, q, ragged, tree, kind), expected, atol=1e-12, rtol=0)
        whole = AlteredVerifier(verifier, (), ragged=True)
        same = enumerate_rounds(p, q, verifier, tree, kind).lengths
        assert_close(enumerate_rounds(p, q, whole, tree, kind).lengths, same)


@pytest.mark.parametrize("hard_draft", [False, True])
@pytest.mark.parametrize(
    ("verifier", "tree"),
    [
        (v, tree)
        for v in (*(one for one in ALL if one.lossless), *GREEDY)
        for tree in (Tree.chain(2), UNEVEN)
        if accepts(v, tree)
    ],
    ids=str,
)
def test_greedy_decoding_comes_out_whatever_was_drafted(
    verifier: Verifier, tree: Tree, hard_draft: bool
) -> None:
    p = hard(by_prefix(5))
    q = hard(by_prefix(6)) if hard_draft else by_prefix(6)
    for kind in verifier.kinds:
        if kind is not Kind.RACE:
            found = enumerate_joint(p, q, verifier, tree, kind)
            assert_close(found, ancestral_joint(p, tree.depth + 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("verifier", "kind"), PAIRS, ids=str)
def test_a_greedy_drafter_stays_lossless_under_every_kind(verifier: Verifier, kind: Kind) -> None:
    tree = UNEVEN if verifier.uses_trees else Tree.chain(2)
    for seed in range(5):
        p, q = by_prefix(seed), hard(by_prefix(seed + 1000))
        found = enumerate_joint(p, q, verifier, tree, kind)
        assert_close(found, ancestral_joint(p, tree.depth + 1), atol=1e-12, rtol=0)


@pytest.mark.parametrize("verifier", [Recursive(), Block(), Traversal(), KSeq()], ids=str)
def test_a_perfect_drafter_is_always_accepted(verifier: Verifier) -> None:
    for tree in (Tree.chain(3), UNEVEN):
        if accepts(verifier, tree):
            for seed in range(3):
                found = enumerate_rounds(by_prefix(seed), by_prefix(seed), verifier, tree, Kind.IID)
                first_path = 3 if tree.is_chain else 2
                assert found.lengths[first_path:].sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("verifier", [Recursive(), Block(), Traversal(), KSeq()], ids=str)
def test_a_drafter_off_the_support_is_never_accepted(verifier: Verifier) -> None:
    p = torch.tensor([0.25, 0.75, 0, 0], dtype=torch.float64)
    q = torch.tensor([0, 0, 0.5, 0.5], dtype=torch.float64)
    for siblings in (1,) if isinstance(verifier, Block) else (1, 2):
        assert expected_accepted(p, q, verifier, siblings, Kind.IID) == 0
        assert_close(enumerate_emitted(p, q, verifier, siblings, Kind.IID), p, atol=1e-12, rtol=0)


def test_coupled_noise_is_not_enumerated() -> None:
    with pytest.raises(ValueError, match="cannot be enumerated"):
        enumerate_emitted(by_prefix(0), by_prefix(1), Coupled())


def test_a_lane_serves_once() -> None:
    @dataclass(frozen=True)
    class Twice(Recursive):
        def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
            super().verify(draft, scores, noise)
            return super().verify(draft, scores, noise)

    with pytest.raises(ValueError, match="used twice"):
        enumerate_emitted(by_prefix(0), by_prefix(1), Twice())


def test_what_a_verifier_cannot_verify_is_refused() -> None:
    x = torch.zeros(2, 2, dtype=torch.int64)
    q = Categorical(torch.zeros(2, 2, 3))
    scores = Scores(Categorical(torch.zeros(2, 3, 3)), torch.zeros(2, 3, dtype=torch.int64))
    siblings, chain = Tree((-1, -1)), Tree.chain(2)
    for verifier, draft, message in (
        (Block(), Draft.from_tree(siblings, x, Kind.IID, q), "chains only"),
        (Recursive(), Draft.from_tree(chain, x, Kind.RACE, q), "RACE"),
        (KSeq(), Draft.from_tree(siblings, x, Kind.WOR, q), "WOR"),
        (Recursive(), Draft.from_tree(siblings, x, Kind.WOR), "Draft.distribution"),
        (Traversal(), replace(Draft.from_tree(siblings, x, Kind.WOR, q), tree=None), "topology"),
    ):
        with pytest.raises(ValueError, match=message):
            verifier.verify(draft, scores, None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AlteredVerifier(Verifier):
    """A verifier that sees some nodes as padding, or no shared topology."""

    verifier: Verifier
    padded: tuple[int, ...]
    ragged: bool = False
    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = tuple(Kind)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        mask = draft.mask.clone()
        mask[:, list(self.padded)] = False
        tree = None if self.ragged else draft.tree
        altered = replace(draft, mask=mask, tree=tree, padded=True)
        return self.verifier.verify(altered, scores, noise)


def hard(
    distributions: Callable[[tuple[int, ...]], Tensor],
) -> Callable[[tuple[int, ...]], Categorical]:
    return lambda prefix: Categorical(distributions(prefix).log(), hard=True)
