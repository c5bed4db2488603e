"""With keyed noise rows are independent of their batch, and frequencies are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.drafters.trees.draws import draw
from mmspec.trees import Tree
from mmspec.verifiers.block import Block
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.spechub import SpecHub
from mmspec.verifiers.traversal import Traversal
from mmspec.verifiers.two_step import TwoStep
from tests.covering import exhaustive
from tests.verifiers.parts import ALL
from tests.verifiers.tolerance import Tolerance

CPU = torch.device("cpu")
LISTED = (*ALL, Recursive(Tolerance(bins=1)))  # as if that rule had been added to RULES
PAIRS = [(v, kind) for v in LISTED for kind in v.kinds]
DEFAULT = [(v, v.kinds[at % len(v.kinds)]) for at, v in enumerate(LISTED)]
UNEVEN = Tree((-1, -1, 0, 1, 1, 2))


def shapes(verifier: Verifier) -> list[Tree]:
    if not verifier.uses_trees:
        return [Tree.chain(3)]
    if isinstance(verifier, SpecHub | TwoStep):
        return [Tree.chain(2), Tree.branching([2, 2]), UNEVEN]
    return [Tree.chain(3), Tree.branching([3, 1]), UNEVEN]


def proposals(
    p: Tensor, q: Tensor, tree: Tree, kind: Kind, noise: KeyedNoise
) -> tuple[Draft, Scores]:
    """Draft along `tree` with distributions p (B, V) and q (B, V) independent of the context."""
    batch = len(p)
    tokens = torch.zeros(batch, tree.nodes, dtype=torch.int64)
    depths = [-1, *tree.depths]
    for row, kids in enumerate(tree.children):
        if kids:
            where = torch.full((batch, 1), depths[row] + 1)
            distribution = Categorical.from_weights(q)[:, None]
            index = torch.tensor([row])
            tokens[:, list(kids)] = draw(distribution, len(kids), kind, noise, where, index)[:, 0]
    distributions = Categorical.from_weights(q[:, None].expand(-1, tree.nodes, -1))
    scores = Categorical.from_weights(p[:, None].expand(-1, tree.nodes + 1, -1))
    position = torch.tensor(depths).add(1).expand(batch, -1)
    return Draft.from_tree(tree, tokens, kind, distributions), Scores(scores, position)


@pytest.mark.parametrize(
    ("verifier", "kind"),
    [
        pair if pair in DEFAULT else pytest.param(*pair, marks=pytest.mark.exhaustive)
        for pair in PAIRS
    ],
    ids=str,
)
def test_a_row_does_not_notice_its_batch(verifier: Verifier, kind: Kind) -> None:
    random = torch.Generator().manual_seed(0)
    for tree in shapes(verifier):
        p, q = torch.rand(2, 16, 4, generator=random)
        noise = KeyedNoise.from_seed(2, 16, CPU).at_round(3)
        draft, scores = proposals(p, q, tree, kind, noise)
        mask = torch.rand(16, tree.nodes, generator=random) < 0.8
        mask = (mask[:, None] | ~draft.ancestors()).all(-1)  # nothing hangs from padding
        draft = replace(draft, mask=mask, padded=True)
        together = verifier.verify(draft, scores, noise)
        assert (together.length > 0).any() or not verifier.lossless
        blank = replace(draft, tokens=torch.where(mask, draft.tokens, 0))
        other = verifier.verify(blank, scores, noise)  # padding has no influence
        assert torch.equal(other.path, together.path)
        assert other.next is not None
        assert together.next is not None
        assert torch.equal(other.next, together.next)
        taken = mask.gather(1, together.path.clamp_min(0)) | (together.path < 0)
        assert taken.all()  # and is not accepted
        for row in range(0, 16, 7):
            own = slice(row, row + 1)
            assert isinstance(scores.distribution, Categorical)
            assert isinstance(draft.distribution, Categorical)
            alone = verifier.verify(
                replace(
                    draft,
                    tokens=draft.tokens[own],
                    parents=draft.parents[own],
                    mask=mask[own],
                    distribution=draft.distribution[own],
                ),
                Scores(scores.distribution[own], scores.position[own]),
                replace(noise, rows=noise.rows[own]),
            )
            assert_same(together, alone, row)
        if not isinstance(verifier, Block | Traversal):
            # a tree is walked alike without its topology; a chain loses its short cut
            ragged = verifier.verify(replace(draft, tree=None), scores, noise)
            if not tree.is_chain or isinstance(verifier, Coupled):
                assert torch.equal(ragged.path, together.path)


def assert_same(together: Verdict, alone: Verdict, row: int) -> None:
    assert together.next is not None
    assert alone.next is not None
    assert together.path[row].tolist() == alone.path[0].tolist()
    assert together.length[row] == alone.length[0]
    assert together.next[row] == alone.next[0]


LOSSLESS = [(v, kind) for v, kind in PAIRS if v.lossless]


@pytest.mark.parametrize("case", exhaustive(LOSSLESS, LOSSLESS[::4]), ids=str)
def test_the_first_two_tokens_are_the_target_s(case: tuple[Verifier, Kind]) -> None:
    """Chi-square with 8 degrees of freedom on 8,000 seeded rows; false alarm 1e-6 per case.

    A distribution whose squares differ by 0.01 of what is expected is seen in 98 cases of 100.
    """
    verifier, kind = case
    rows = 8_000
    p = torch.tensor([0.5, 0.3, 0.2]).expand(rows, -1)
    q = torch.tensor([0.2, 0.5, 0.3]).expand(rows, -1)
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(1))
    noise = KeyedNoise(keys)
    draft, scores = proposals(p, q, shapes(verifier)[-1], kind, noise)
    verdict = verifier.verify(draft, scores, noise)
    pair = first_two(draft, verdict, p)
    expected = (p[0][:, None] * p[0]).flatten() * rows
    counts = torch.bincount(pair[:, 0] * 3 + pair[:, 1], minlength=9)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor(4.0), statistic / 2) > 1e-6


def first_two(draft: Draft, verdict: Verdict, p: Tensor) -> Tensor:  # (B, 2)
    """The first two emitted tokens, the target adding what is missing."""
    assert verdict.next is not None
    added = torch.multinomial(p, 2, replacement=True, generator=torch.Generator().manual_seed(9))
    rows = torch.arange(draft.batch)
    kept = draft.tokens.gather(1, verdict.path.clamp_min(0))
    emitted = torch.cat([kept, added], 1)
    emitted[rows, verdict.length] = verdict.next
    emitted[rows, verdict.length + 1] = added[:, 0]
    return emitted[:, :2]


@pytest.mark.parametrize("verifier", LISTED, ids=str)
def test_nothing_proposed_yields_one_token(verifier: Verifier) -> None:
    p = Categorical(torch.randn(2, 1, 5, generator=torch.Generator().manual_seed(0)))
    scores = Scores(p, torch.zeros(2, 1, dtype=torch.int64))
    for draft in (Draft.empty(2, CPU), replace(Draft.empty(2, CPU), tree=None)):
        if isinstance(verifier, Traversal) and draft.tree is None:
            continue  # wants to be told that the rows agree
        verdict = verifier.verify(draft, scores, KeyedNoise.from_seed(0, 2, CPU))
        assert verdict.path.shape == (2, 0)
        assert verdict.length.tolist() == [0, 0]
        assert verdict.next is not None
        assert verdict.next.shape == (2,)
