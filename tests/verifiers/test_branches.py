"""All siblings at once accept as sibling after sibling, whatever the shapes of rows and trees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verifier
from mmspec.drafters.trees.draws import draw
from mmspec.trees import Tree
from mmspec.verifiers.branches import (
    Branches,
    find_branches,
    gather_branches,
    reject_one_by_one,
    verify_branches,
)
from mmspec.verifiers.enumeration import ancestral_joint, enumerate_joint
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft
from mmspec.verifiers.kseq import KSeq
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.sample_and_match import SampleAndMatch
from tests.verifiers.random_distributions import by_prefix

SIZE = 12
ROWS = 4_000
ALARM = 1e-5  # false alarms of a frequency test
UNEVEN = Tree((-1, -1, -1, 0, 0, 1, 3, 3, 3))
VERIFIERS = [
    (Recursive(), Kind.WOR),
    (Recursive(), Kind.IID),
    (Recursive(), Kind.DET),
    (GreedyMultiDraft(), Kind.HUB),
    (KSeq(), Kind.IID),
    (SampleAndMatch(), Kind.WOR),
]
IN_FLOAT64 = (KSeq(),)  # by default: its grid of ratios is much smaller than in float32


@dataclass(frozen=True)
class OneByOne(Exact):
    """The same rule, tested by the walk that descends level by level."""


@dataclass(frozen=True)
class Round:
    """One round of many rows with the same distributions after every prefix."""

    draft: Draft
    scores: Scores
    noise: KeyedNoise
    p: Tensor  # (V,)

    @classmethod
    def make(
        cls, tree: Tree, kind: Kind, top_k: int = 0, dtype: torch.dtype = torch.float32
    ) -> Round:
        torch.manual_seed(3)
        logits, drafted = torch.randn(2, SIZE, dtype=dtype).mul(1.5)
        if top_k:  # sparse: all but the best have probability 0, and not the same in both
            for one in (logits, drafted):
                one[one < one.topk(top_k).values[-1]] = -torch.inf
        noise = KeyedNoise.from_seed(5, ROWS, torch.device("cpu")).at_round(2)
        q = Categorical(drafted.expand(ROWS, 1, -1))
        tokens = torch.zeros(ROWS, tree.nodes, dtype=torch.int64)
        for row, children in enumerate(tree.children):
            if children:
                place = torch.zeros(ROWS, 1, dtype=torch.int64)
                drawn = draw(q, len(children), kind, noise, place, torch.tensor([row]))
                tokens[:, list(children)] = drawn[:, 0]
        drafts = Categorical(drafted.expand(ROWS, tree.nodes, -1))
        draft = Draft.from_tree(tree, tokens, kind, None if kind is Kind.DET else drafts)
        p = Categorical(logits.expand(ROWS, tree.nodes + 1, -1))
        position = torch.tensor([0, *(depth + 1 for depth in tree.depths)]).expand(ROWS, -1)
        return cls(draft, Scores(p, position), noise, logits.softmax(-1))


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square test."""
    degrees = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def first_tokens(draft: Draft, verifier: Verifier, given: Round) -> Tensor:
    """The first token of each row."""
    verdict = verifier.verify(draft, given.scores, given.noise)
    first = draft.tokens.gather(1, verdict.path[:, :1].clamp_min(0))[:, 0]
    assert verdict.next is not None
    return torch.where(verdict.length > 0, first, verdict.next)


@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize(
    ("verifier", "kind", "dtype"),
    [
        *((one, kind, torch.float64) for one, kind in VERIFIERS if one in IN_FLOAT64),
        *(
            pytest.param(
                *(one, kind, torch.float32),
                marks=pytest.mark.exhaustive if one in IN_FLOAT64 else (),
            )
            for one, kind in VERIFIERS
        ),
    ],
    ids=str,
)
def test_the_first_token_is_the_target_s_in_any_shape(
    verifier: Verifier, kind: Kind, dtype: torch.dtype, top_k: int
) -> None:
    """A tree of all rows, trees that differ between rows, and padding; by chi-square."""
    given = Round.make(UNEVEN, kind, top_k, dtype)
    shared = given.draft
    ragged = replace(shared, tree=None, max_depth=UNEVEN.depth)
    masked = (torch.arange(ROWS)[:, None] % 7 > 3) & torch.tensor(
        [0, 1, 0, 1, 1, 0, 0, 1, 0]
    ).bool()
    mask = ~(masked[:, None] & shared.ancestors()).any(-1)
    if kind is Kind.HUB:  # the sampled child is the last of its siblings
        mask = torch.ones_like(mask)
    support = given.p > 0
    for draft in (shared, ragged, replace(shared, mask=mask, padded=True)):
        counts = torch.bincount(first_tokens(draft, verifier, given), minlength=SIZE).double()
        assert counts[~support].sum() == 0
        assert p_value(counts[support], (given.p[support] * ROWS).double()) > ALARM


@pytest.mark.parametrize(("verifier", "kind"), VERIFIERS, ids=str)
def test_padding_counts_as_no_child_in_any_layout(verifier: Verifier, kind: Kind) -> None:
    """A shared tree with padding accepts as rows that differ, with the same noise."""
    if kind is Kind.HUB:  # the sampled child is the last of its siblings
        return
    given = Round.make(UNEVEN, kind, dtype=torch.float64)
    hidden = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1]).bool()
    masked = replace(given.draft, mask=~hidden.expand(ROWS, -1), padded=True)
    ragged = replace(masked, tree=None, max_depth=UNEVEN.depth)
    one, other = (verifier.verify(draft, given.scores, given.noise) for draft in (masked, ragged))
    assert torch.equal(one.path, other.path)
    assert torch.equal(one.length, other.length)


def test_a_residual_from_p_fails_the_same_test() -> None:
    given = Round.make(UNEVEN, Kind.WOR)

    def wrong(branches: Branches) -> tuple[Tensor, Tensor]:
        p = branches.p.clone()
        return reject_one_by_one(branches, Kind.WOR)[0], p

    verdict = verify_branches(given.draft, given.scores, given.noise, wrong)
    assert verdict.next is not None
    first = given.draft.tokens.gather(1, verdict.path[:, :1].clamp_min(0))[:, 0]
    counts = torch.bincount(torch.where(verdict.length > 0, first, verdict.next), minlength=SIZE)
    assert p_value(counts.double(), (given.p * ROWS).double()) < ALARM


@pytest.mark.parametrize("kind", [Kind.WOR, Kind.IID, Kind.DET])
def test_siblings_have_the_same_joint_distribution_one_by_one(kind: Kind) -> None:
    p, q = by_prefix(4, 3), by_prefix(11, 3)
    for tree in (Tree.branching([2, 2]), Tree((-1, -1, 0, 1, 1))):
        expected = ancestral_joint(p, tree.depth + 1)
        for rule in (Exact(), OneByOne()):
            found = enumerate_joint(p, q, Recursive(rule), tree, kind)
            assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", [Kind.WOR, Kind.IID, Kind.DET])
def test_branches_do_not_depend_on_how_rows_are_laid_out(kind: Kind) -> None:
    """A shared tree orders its branches by how many children they have."""
    given = Round.make(UNEVEN, kind, dtype=torch.float64)
    probs = Categorical(given.scores.distribution.scores[:50]).probs  # type: ignore[attr-defined]
    few = replace(
        given.draft,
        tokens=given.draft.tokens[:50],
        parents=given.draft.parents[:50],
        mask=given.draft.mask[:50],
        distribution=None if kind is Kind.DET else given.draft.distribution[:50],  # type: ignore[index]
    )
    found = []
    for draft in (few, replace(few, tree=None, max_depth=UNEVEN.depth)):
        layout = find_branches(draft)
        survival, rest = reject_one_by_one(gather_branches(draft, probs, layout), kind)
        rest = rest / rest.sum(-1, keepdim=True)
        rows = range(UNEVEN.nodes + 1) if layout.rows is None else layout.rows.tolist()
        found.append({row: (survival[:, at], rest[:, at]) for at, row in enumerate(rows)})
    shared, ragged = found
    for row, (survival, rest) in shared.items():
        count = len(UNEVEN.children[row])
        assert_close(survival[:, :count], ragged[row][0][:, :count])
        assert_close(rest, ragged[row][1])


def test_a_residual_that_is_empty_by_rounding_leaves_p() -> None:
    """Where p equals q nothing is ever refused but by rounding; then the token comes from p."""
    tree = Tree.branching([2])
    logits = torch.tensor([0.3, -0.2, 0.9])
    p = Categorical(logits.expand(4, 3, -1))
    draft = Draft.from_tree(
        tree, torch.tensor([[0, 2]]).expand(4, -1), Kind.WOR, Categorical(logits.expand(4, 2, -1))
    )

    def refuse(branches: Branches) -> tuple[Tensor, Tensor]:
        _, rest = reject_one_by_one(branches, Kind.WOR)
        assert not rest.any()
        return torch.ones(4, 1, 2), rest

    noise = KeyedNoise.from_seed(0, 4, torch.device("cpu"))
    verdict = verify_branches(draft, Scores(p, torch.zeros(4, 3).long()), noise, refuse)
    assert verdict.length.tolist() == [0] * 4
    expected = noise.pick(p.probs[:, 0], 3)
    assert verdict.next is not None
    assert torch.equal(verdict.next, expected)


def test_no_table_grows_with_the_square_of_the_nodes_times_the_vocabulary() -> None:
    """All tensors of a walk over 64 nodes hold at most a few rows of probabilities per node."""
    tree, size = Tree.branching([4, 3, 2, 1]), 500
    batch, largest = 2, 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    q = Categorical(torch.randn(batch, tree.nodes, size))
    tokens = torch.randint(size, (batch, tree.nodes))
    draft = Draft.from_tree(tree, tokens, Kind.WOR, q)
    scores = Scores(Categorical(torch.randn(batch, tree.nodes + 1, size)), torch.zeros(batch, 1))
    noise = KeyedNoise.from_seed(0, batch, torch.device("cpu"))
    with Sizes():  # type: ignore[no-untyped-call]
        Recursive().verify(draft, scores, noise)
    assert largest <= batch * (tree.nodes + 1) * size
