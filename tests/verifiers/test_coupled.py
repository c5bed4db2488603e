"""Coupled verification equals plain decoding with the same seed, for any draft."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction as F

import pytest
import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.gaussian import Gaussian
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verdict
from mmspec.drafters.trees.draws import draw
from mmspec.trees import Tree
from mmspec.verifiers.coupled import Coupled
from tests.covering import covering

SIZE, BATCH, STEPS = 5, 3, 14
CPU = torch.device("cpu")
TREES = [
    Tree.chain(0),
    Tree.chain(1),
    Tree.chain(4),
    Tree.branching([3]),
    Tree.branching([2, 2, 1]),
    Tree((-1, -1, 0, 1, 1, 2, 5)),
]


class Toy:
    """A target and a drafter whose distributions depend on the last two tokens."""

    def __init__(self, hard: bool) -> None:
        random = torch.Generator().manual_seed(7)
        self.p = torch.randn(SIZE, SIZE, SIZE, generator=random) * 1.5
        self.q = self.p + 0.7 * torch.randn(SIZE, SIZE, SIZE, generator=random)
        self.hard = hard

    def target(self, tokens: Tensor) -> Categorical:  # (..., T) -> (...)
        return Categorical(self.p[tokens[..., -2], tokens[..., -1]], self.hard)

    def drafter(self, tokens: Tensor) -> Categorical:
        return Categorical(self.q[tokens[..., -2], tokens[..., -1]])


def plain(toy: Toy, noise: KeyedNoise) -> Tensor:  # (B, 2 + STEPS)
    tokens = torch.zeros(BATCH, 2, dtype=torch.int64)
    for position in range(2, 2 + STEPS):
        at = torch.full((BATCH, 1), position)
        distribution = Categorical(toy.target(tokens).scores[:, None], toy.hard)
        tokens = torch.cat([tokens, distribution.sample(noise.shared_keys(at))], 1)
    return tokens


def propose(
    toy: Toy, tokens: Tensor, tree: Tree, kind: Kind, noise: KeyedNoise
) -> tuple[Draft, Scores]:
    """Draft and score one row (1, T) along `tree`."""
    paths, distributions = {-1: tokens}, []
    drawn = torch.zeros(1, tree.nodes, dtype=torch.int64)
    for row, kids in enumerate(tree.children):
        if kids:
            before = paths[row - 1]
            distribution = Categorical(toy.drafter(before).scores[:, None])
            where = torch.full((1, 1), before.shape[1])
            found = draw(distribution, len(kids), kind, noise, where, torch.tensor([row]))[0, 0]
            for kid, x in zip(kids, found, strict=True):
                drawn[0, kid] = x
                paths[kid] = torch.cat([before, x.view(1, 1)], 1)
    for parent in tree.parents:
        distributions.append(toy.drafter(paths[parent]))
    scores = Categorical.stack([toy.target(paths[i]) for i in range(-1, tree.nodes)])
    position = torch.tensor([[paths[i].shape[1] for i in range(-1, tree.nodes)]])
    distribution_ = Categorical.stack(distributions) if distributions else None
    return Draft.from_tree(tree, drawn, kind, distribution_), Scores(scores, position)


@pytest.mark.parametrize(
    ("kind", "tree", "hard"), covering(list(Kind), TREES, (False, True), strength=1)
)
def test_any_draft_yields_the_tokens_of_plain_decoding(kind: Kind, tree: Tree, hard: bool) -> None:
    toy, noise = Toy(hard), KeyedNoise.from_seed(11, BATCH, CPU)
    expected = plain(toy, noise)
    for row in range(BATCH):
        own = KeyedNoise(noise.rows[row : row + 1])
        tokens, index, accepted = torch.zeros(1, 2, dtype=torch.int64), 0, 0
        while tokens.shape[1] < 2 + STEPS:
            draft, scores = propose(toy, tokens, tree, kind, own.at_round(index))
            verdict = Coupled().verify(draft, scores, own.at_round(index))
            assert verdict.next is not None
            kept = draft.tokens[0, verdict.path[0, : int(verdict.length)]]
            tokens = torch.cat([tokens, kept[None], verdict.next[:, None]], 1)
            index, accepted = index + 1, accepted + len(kept)
        assert tokens[0, : 2 + STEPS].tolist() == expected[row].tolist()
        assert accepted > 0 or tree.nodes < 2 or kind is not Kind.RACE


@pytest.mark.parametrize(
    ("p", "q", "rate"),
    [
        ("5 3 2", "2 5 3", "43/62"),
        ("40 35 15 10", "10 20 40 30", "5603/10665"),
        ("1 2 7", "6 3 1", "23/65"),
    ],
)
def test_race_proposals_are_accepted_at_the_known_rate(p: str, q: str, rate: str) -> None:
    """Seeded frequency over 200,000 positions, five standard errors: false alarm 6e-7."""
    count, expected = 200_000, float(F(rate))
    distributions = [
        Categorical.from_weights(
            torch.tensor([float(x) for x in distribution.split()])
        ).scores.expand(1, count, -1)
        for distribution in (p, q)
    ]
    noise, where = KeyedNoise.from_seed(3, 1, CPU), torch.arange(count)[None]
    x = draw(Categorical(distributions[1]), 1, Kind.RACE, noise, where, where)[..., 0]
    y = Categorical(distributions[0]).sample(noise.shared_keys(where))
    error = (expected * (1 - expected) / count) ** 0.5
    assert abs(float((x == y).double().mean()) - expected) < 5 * error


def test_of_duplicate_siblings_the_longer_continuation_is_taken() -> None:
    tree = Tree((-1, -1, 1))
    p = torch.full((1, 4, 3), -9.0)
    p[:, :, 2] = 0
    scores = Scores(Categorical(p, hard=True), torch.tensor([[0, 1, 1, 2]]))
    draft = Draft.from_tree(tree, torch.tensor([[2, 2, 2]]), Kind.IID)
    verdict = Coupled().verify(draft, scores, KeyedNoise.from_seed(0, 1, CPU))
    assert verdict.path.tolist() == [[1, 2]]
    assert verdict.length.tolist() == [2]


def test_rows_may_differ_in_topology_and_padding() -> None:
    toy = Toy(False)
    noise = KeyedNoise.from_seed(5, 4, CPU)
    shapes = [Tree.chain(3), Tree((-1, -1, 0)), Tree((-1, 0, 0, 1)), Tree(())]
    singles, verdicts = [], list[Verdict]()
    for row, tree in enumerate(shapes):
        own = KeyedNoise(noise.rows[row : row + 1])
        single = propose(toy, torch.zeros(1, 2, dtype=torch.int64), tree, Kind.RACE, own)
        singles.append(single)
        verdicts.append(Coupled().verify(*single, own))
    draft, scores = stack_rows(singles)
    together = Coupled().verify(draft, scores, noise)
    for row, verdict in enumerate(verdicts):
        length = int(verdict.length)
        assert together.length[row] == length
        assert together.path[row, :length].tolist() == verdict.path[0, :length].tolist()
        assert together.next is not None
        assert verdict.next is not None
        assert together.next[row] == verdict.next[0]


def stack_rows(singles: list[tuple[Draft, Scores]]) -> tuple[Draft, Scores]:
    """Rows of different topology as one batch; padding hangs from the context."""
    most = max(draft.nodes for draft, _ in singles)
    tokens, parents = torch.zeros(2, len(singles), most, dtype=torch.int64)
    parents = parents - 1
    mask = torch.zeros(len(singles), most, dtype=torch.bool)
    distributions = torch.zeros(len(singles), most + 1, SIZE)
    position = torch.zeros(len(singles), most + 1, dtype=torch.int64)
    for row, (draft, scores) in enumerate(singles):
        tokens[row, : draft.nodes] = draft.tokens[0]
        parents[row, : draft.nodes] = draft.parents[0]
        mask[row, : draft.nodes] = True
        assert isinstance(scores.distribution, Categorical)
        distributions[row, : draft.nodes + 1] = scores.distribution.scores[0]
        position[row, : draft.nodes + 1] = scores.position[0]
    return Draft(tokens, parents, mask, Kind.RACE), Scores(Categorical(distributions), position)


def test_continuous_tokens_must_agree_in_every_entry() -> None:
    mean = torch.zeros(2, 4, 2, 3)
    distribution = Gaussian(mean, torch.ones(1, 1, 1, 1), events=2)
    noise, position = KeyedNoise.from_seed(1, 2, CPU), torch.arange(4).expand(2, -1)
    tokens = distribution.sample(noise.shared_keys(position))[:, :3].clone()
    tokens[1, 1, 0, 2] += 1e-3
    draft = Draft.chain(tokens, Kind.RACE)
    verdict = Coupled().verify(draft, Scores(distribution, position), noise)
    assert verdict.length.tolist() == [3, 1]
    assert verdict.next is not None
    assert verdict.next.shape == (2, 2, 3)
    assert torch.equal(verdict.next[1], distribution.sample(noise.shared_keys(position))[1, 1])
    tree = replace(draft, tree=None)
    assert Coupled().verify(tree, Scores(distribution, position), noise).length.tolist() == [3, 1]
