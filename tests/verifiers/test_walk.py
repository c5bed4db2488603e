"""A walk tests no sibling after an accepted one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.traversal import Traversal
from mmspec.verifiers.walk import find_longest_path, is_all_false, one_hot


@dataclass(frozen=True)
class CountingRule:
    """`Exact`, with a list of its tests."""

    asked: list[str] = field(default_factory=list)
    lossless: ClassVar[bool] = True

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        self.asked.append("accept")
        return Exact().accept(p, q, x)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        self.asked.append("residual")
        return Exact().residual(p, q, x)


@pytest.mark.parametrize("kind", [Kind.DET, Kind.WOR])
@pytest.mark.parametrize("wanted", [1, 2, 3, 9])
def test_siblings_are_tested_up_to_the_accepted_one(kind: Kind, wanted: int) -> None:
    """Five siblings at each of two levels; the target predicts `wanted`, which is no child if 9."""
    tree = Tree.branching([5, 5])
    tokens = torch.arange(5).repeat(6)[None]
    q = Categorical.from_weights(torch.ones(1, 30, 10)) if kind is Kind.WOR else None
    p = Categorical.from_weights(one_hot(torch.full((1, 31), wanted), torch.zeros(10)))
    scores = Scores(p, torch.zeros(1, 31).long())
    noise, rule = KeyedNoise.from_seed(0, 1, torch.device("cpu")), CountingRule()
    verdict = Recursive(rule).verify(Draft.from_tree(tree, tokens, kind, q), scores, noise)
    levels, misses = (1, 5) if wanted == 9 else (2, wanted)
    assert int(verdict.length) == (0 if wanted == 9 else 2)
    assert verdict.next is not None
    assert int(verdict.next) == wanted
    assert rule.asked.count("residual") == levels * misses
    assert rule.asked.count("accept") == levels * misses + 2 * (wanted != 9)


@pytest.mark.parametrize("kind", [Kind.DET, Kind.WOR])
@pytest.mark.parametrize("verifier", [Recursive(), Traversal()], ids=lambda one: type(one).__name__)
def test_a_point_mass_is_verified_as_the_same_distribution(verifier: Verifier, kind: Kind) -> None:
    """Greedy decoding compares tokens; its verdict is that of the one-hot probabilities."""
    torch.manual_seed(0)
    batch, tree = 64, Tree.branching([3, 2, 2])
    scores = torch.randn(batch, tree.nodes + 1, 5)
    drafted = torch.randn(batch, tree.nodes, 5)
    tokens = torch.empty(batch, tree.nodes, dtype=torch.int64)
    for children in filter(None, tree.children):  # siblings differ and share a distribution
        drafted[:, list(children)] = drafted[:, children[0], None]
        tokens[:, list(children)] = drafted[:, children[0]].topk(len(children), -1).indices
    draft = Draft.from_tree(tree, tokens, kind, Categorical(drafted) if kind is Kind.WOR else None)
    position = torch.zeros(batch, tree.nodes + 1).long()
    noise = KeyedNoise.from_seed(0, batch, torch.device("cpu"))
    greedy = Categorical(scores, hard=True)
    one, other = (
        verifier.verify(draft, Scores(p, position), noise)
        for p in (greedy, Categorical.from_probs(greedy.probs))
    )
    assert len(set(one.length.tolist())) > 2
    for name in ("path", "length", "next"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("tie", "path"),
    [
        ([0.0, 1.0, 0.5, 0.1, 9.0], [1, 3]),  # the sum counts, not the last node
        ([1.0, 0.0, 0.1, 0.5, -9.0], [0, 2]),
        ([-1.0, -2.0, -5.0, -3.0, -0.1], [1, 3]),  # a shorter path never counts
        ([0.0, 0.0, 0.0, 0.0, 0.0], [0, 2]),  # else the first
    ],
)
def test_of_longest_paths_the_largest_sum_wins(tie: list[float], path: list[int]) -> None:
    tree = Tree((-1, -1, 0, 1, -1))  # 0-2, 1-3 and 4
    draft = Draft.from_tree(tree, torch.zeros(1, 5).long(), Kind.DET)
    found, length, row = find_longest_path(draft, torch.ones(1, 5).bool(), torch.tensor([tie]))
    assert found.tolist() == [path]
    assert (length.tolist(), row.tolist()) == ([2], [path[-1] + 1])


def test_one_row_is_somebody() -> None:
    assert is_all_false(torch.zeros(3, 2).bool())
    assert not is_all_false(torch.tensor([False, True]))
    assert not is_all_false(torch.zeros(3, 2, device="meta").bool())  # an accelerator is not asked
