"""DySpec: which draws are made is decided before they are made, so the output is the target's."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import DraftModel, DraftNodes
from mmspec.drafters.trees.dyspec import DySpec
from mmspec.drafters.trees.level_tree import Children, Ranking
from mmspec.trees import Tree
from mmspec.verifiers.enumeration import Enumeration, ancestral_joint, enumerate_verdicts
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.traversal import Traversal
from tests import toys
from tests.drafters.driving import context
from tests.partners import noisy

P = torch.tensor([[0.3, 0.5, 0.2], [0.1, 0.6, 0.3], [0.5, 0.2, 0.3]], dtype=torch.float64)
Q = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.1, 0.6], [0.2, 0.7, 0.1]], dtype=torch.float64)


class Bigram(DraftModel):
    """The distribution after each token; the context ends with token 0."""

    sees = "nothing"

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def predict_first(self, context: Any, state: Any) -> Categorical:
        return Categorical(Q[0].log().expand(context.batch, 1, -1))

    def predict(self, context: Any, state: Any, nodes: DraftNodes) -> Categorical:
        self.read.append(nodes.tokens)
        return Categorical(Q[nodes.tokens].log())


class Orders:
    """Noise that draws the tokens below node i of the reading order in the order of a permutation.

    Row r has one permutation per node; all rows together are all combinations.
    """

    def __init__(self, reads: int) -> None:
        every = [*permutations(range(3))]
        self.orders = torch.tensor([*product(every, repeat=reads)])  # (R, reads, V)
        self.rows = torch.arange(len(self.orders))

    def fresh_keys(self, lane: int, index: Tensor) -> Any:
        self.index = index
        return self

    def gumbel(self, size: int) -> Tensor:
        place = self.index.clamp_max(1) + (self.index - 2).clamp_min(0)  # 0, 2, 3.. -> 0, 1, 2..
        return -100.0 * self.orders[:, place].argsort(-1)

    def weight(self, read: Tensor) -> Tensor:  # (R, reads - 1) tokens -> (R,)
        """Their probability as draws without replacement; `read` follow the context's token 0."""
        q = Q[torch.cat((torch.zeros_like(read[:, :1]), read), 1)].gather(-1, self.orders)
        left = 1 - (q.cumsum(-1) - q)
        return (q[..., :2] / left[..., :2]).prod(-1).prod(-1)


def enumerated(shape: DySpec, verifier: Any = None) -> tuple[Draft, Tensor, Enumeration]:
    """All drafts of a shape of two children a node, and all decisions about them."""
    noise = Orders(1 + 2 * (shape.depth - 1))
    now = context(*[[0]] * len(noise.orders), vocabulary=3)
    model = Bigram()
    draft = shape.grow(model, replace(now, noise=noise), None, None, Kind.WOR).draft  # type: ignore[arg-type]
    empty = torch.zeros(draft.batch, 0, dtype=torch.int64)
    weight = noise.weight(torch.cat([empty, *model.read], 1))
    found = enumerate_verdicts(
        lambda path: P[path[-1] if path else 0],
        draft,
        weight,
        verifier or Recursive(),
        shape.depth,
    )
    return draft, weight, found


def error(shape: DySpec, verifier: Any = None) -> float:
    _, weight, found = enumerated(shape, verifier)
    torch.testing.assert_close(weight.sum(), torch.ones((), dtype=torch.float64))
    wanted = ancestral_joint(lambda path: P[path[-1] if path else 0], shape.depth + 1)
    return float((found.joint - wanted).abs().max())


class KeepsTheLikeliest(DySpec):
    """Wrong: keeps the drawn tokens of the most probable paths, as a ranked tree does."""

    def begin_ranking(self, *given: Any) -> Ranking:
        rank = super().begin_ranking(*given)

        def by_token(*given: Any) -> Children:
            found = rank(*given)
            return replace(found, keep=found.log_q)

        return by_token


class Whole(Recursive):
    """Wrong: siblings are verified with the whole q, not with what is left of it."""

    def verify(self, draft: Draft, *others: Any) -> Any:
        return super().verify(replace(draft, kind=Kind.IID), *others)


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_the_output_is_the_targets(nodes: int) -> None:
    """Two levels, all orders of draws, all decisions; where a draw is made depends on others."""
    assert error(DySpec(depth=2, beam=2, nodes=nodes)) < 1e-12


def test_wrong_variants_have_another_output() -> None:
    assert error(KeepsTheLikeliest(depth=2, beam=2, nodes=3)) > 1e-3
    assert error(DySpec(depth=2, beam=2, nodes=4), Whole()) > 1e-3


def test_a_threshold_ends_branches_and_stays_exact() -> None:
    shape = DySpec(depth=2, beam=2, nodes=6, threshold=0.3)
    draft = enumerated(shape)[0]
    assert len(set(draft.mask.sum(1).tolist())) > 1
    assert error(shape) < 1e-12


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [4, 6])
def test_three_levels(nodes: int) -> None:
    assert error(DySpec(depth=3, beam=2, nodes=nodes)) < 1e-12


@pytest.mark.exhaustive
def test_single_rows_are_exact_from_the_leaves_too() -> None:
    """`Traversal` takes one topology at a time; which one it is depends on the draws."""
    shape = DySpec(depth=2, beam=2, nodes=4)
    draft, weight, _ = enumerated(shape)
    topologies, own = draft.parents.unique(dim=0, return_inverse=True)
    assert len(topologies) > 1
    joint = torch.zeros(3, 3, 3, dtype=torch.float64)
    for place, parents in enumerate(topologies.tolist()):
        rows = own == place
        assert draft.distribution is not None
        one = Draft.from_tree(
            Tree(tuple(parents)), draft.tokens[rows], Kind.WOR, draft.distribution[rows]
        )
        joint += enumerate_verdicts(
            lambda path: P[path[-1] if path else 0], one, weight[rows], Traversal()
        ).joint
    wanted = ancestral_joint(lambda path: P[path[-1] if path else 0], 3)
    torch.testing.assert_close(joint, wanted, atol=1e-12, rtol=0)


def by_heap(draws: dict[tuple[int, ...], list[int]], nodes: int) -> set[tuple[int, ...]]:
    """Algorithm 1: the largest value is drawn next; its sibling and its child are candidates."""
    waiting: list[tuple[float, tuple[int, ...], int]] = [(1.0, (), 0)]
    made = set[tuple[int, ...]]()
    while waiting and len(made) < nodes:
        waiting.sort()
        value, parent, place = waiting.pop()
        if parent not in draws or place >= len(draws[parent]):
            continue
        q = Q[parent[-1] if parent else 0]
        token = draws[parent][place]
        left = 1 - float(q[draws[parent][:place]].sum())
        made.add((*parent, token))
        waiting.append((value * float(q[token]) / left, (*parent, token), 0))
        waiting.append((value * (1 - float(q[token]) / left), parent, place + 1))
    return made


def test_it_is_the_tree_of_algorithm_1() -> None:
    """Of every combination of draws of two levels, the heap makes the same."""
    noise, model = Orders(3), Bigram()
    now: Any = replace(context(*[[0]] * 216, vocabulary=3), noise=noise)  # type: ignore[arg-type]
    draft = DySpec(depth=2, beam=2, nodes=4).grow(model, now, None, None, Kind.WOR).draft
    for row, (first, *below) in enumerate(noise.orders.tolist()):
        draws: dict[tuple[int, ...], list[int]] = {(): first[:2]}
        draws |= {(first[at],): below[at][:2] for at in range(2)}
        found: list[tuple[int, ...]] = []
        for token, parent in zip(
            draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True
        ):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        assert set(found) == by_heap(draws, 4)


@pytest.mark.exhaustive
def test_greedy_output_is_the_targets_with_ragged_rows() -> None:
    model, drafter = toys.model("llama"), noisy("llama")
    request = toys.inputs("llama", batch=2, ragged=True)
    wanted = model.generate(**request, max_new_tokens=10)
    for threshold in (0.0, 0.05):
        shape = DySpec(depth=3, beam=3, nodes=8, threshold=threshold)
        fast = mmspec.accelerate(
            model, "coupled", drafter=drafter, tree=shape, verifier="rejection"
        )
        out = fast.generate(**request, max_new_tokens=10)
        assert torch.equal(out.sequences, wanted)
        assert out.stats.fallback is None
        assert out.stats.mean_acceptance_length > 1.5
        sampled = fast.generate(**request, max_new_tokens=10, do_sample=True, seed=1)
        assert sampled.stats.fallback is None


def test_draws_without_mass_are_not_made() -> None:
    class Certain(Bigram):
        def predict_first(self, context: Any, state: Any) -> Categorical:
            return Categorical(torch.tensor([0.0, -math.inf, -math.inf]).expand(1, 1, 3))

    now = context([0], vocabulary=3)
    shape = DySpec(depth=1, beam=3, nodes=3, threshold=1e-6)
    draft = shape.grow(Certain(), now, None, None, Kind.WOR).draft
    assert draft.tokens.tolist() == [[0]]


def test_a_bad_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold=2"):
        DySpec(threshold=2)
