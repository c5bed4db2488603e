"""Several samples of the target per node: closed forms, a slow reference, and ties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import log, prod
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import KeyedNoise, Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.distances import total_variation
from mmspec.verifiers.enumeration import enumerate_emitted, enumerate_joint, enumerate_rounds
from mmspec.verifiers.multi_draw import MultiDraw
from tests.verifiers.random_distributions import by_prefix, distributions, vector

P, Q = vector(0.5, 0.3, 0.2), vector(0.2, 0.5, 0.3)  # proposes 1, then 2


@pytest.mark.parametrize("draws", [1, 2, 3, 4])
def test_a_single_child_comes_out_as_its_formula_predicts(draws: int) -> None:
    for p, q in zip(*distributions(4, 4), strict=True):
        child = int(q.argmax())
        missed = 1 - p[child]
        wanted = p * missed ** (draws - 1)
        wanted[child] = 1 - missed**draws
        found = enumerate_emitted(p, q, MultiDraw(draws), 1, Kind.DET)
        assert_close(found, wanted, atol=1e-12, rtol=0)
        assert_close(total_variation(found, p), missed - missed**draws, atol=1e-12, rtol=0)


def test_more_draws_accept_more_up_to_all_that_is_possible() -> None:
    found = [float(enumerate_emitted(P, Q, MultiDraw(n), 1, Kind.DET)[1]) for n in (1, 2, 3, 6)]
    assert found == sorted(set(found))
    assert found[-1] == pytest.approx(1 - 0.7**6)
    none = vector(0.5, 0.0, 0.5)  # what the target cannot say is never accepted
    assert enumerate_emitted(none, Q, MultiDraw(6), 1, Kind.DET)[1] == 0


def reference(
    p: Callable[[tuple[int, ...]], Tensor], tree: Tree, tokens: list[int], draws: int
) -> dict[tuple[int, ...], float]:
    """The distribution of the output, by recursion over all samples at every node."""
    size = len(p(()))
    text: dict[int, tuple[int, ...]] = {-1: ()}
    for node, parent in enumerate(tree.parents):
        text[node] = (*text[parent], tokens[node])

    def paths(node: int, drawn: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        kids = [kid for kid in range(tree.nodes) if tree.parents[kid] == node]
        hit = [kid for kid in kids if tokens[kid] in drawn[node]]
        return [()] + [(kid, *below) for kid in hit for below in paths(kid, drawn)]

    distributions_ = {node: p(said).tolist() for node, said in text.items()}
    found: dict[tuple[int, ...], float] = {}
    for ways in product(product(range(size), repeat=draws), repeat=tree.nodes + 1):
        drawn = dict(zip(range(-1, tree.nodes), ways, strict=True))
        weight = prod(distributions_[node][token] for node, way in drawn.items() for token in way)
        if weight == 0:
            continue
        best = max(
            paths(-1, drawn),
            key=lambda way: (
                len(way),
                sum(log(distributions_[tree.parents[node]][tokens[node]]) for node in way),
            ),
        )
        end = best[-1] if best else -1
        said = (*text[end], drawn[end][0])
        found[said] = found.get(said, 0.0) + weight
    return found


@pytest.mark.parametrize("parents", [(-1, -1), (-1, 0), (-1, -1, 1)], ids=str)
def test_trees_do_what_the_slow_reference_finds(parents: tuple[int, ...]) -> None:
    tree, draws = Tree(parents), 2
    for seed in (3, 5):
        p, q = by_prefix(seed), by_prefix(seed + 1000)
        tokens = greedy_draft(q, tree)
        wanted = torch.zeros((3,) * (tree.depth + 1), dtype=torch.float64)
        for said, weight in reference(p, tree, tokens, draws).items():
            rest = [(said, weight)]
            while len(rest[0][0]) <= tree.depth:  # the target goes on by itself
                rest = [((*s, x), w * float(p(s)[x])) for s, w in rest for x in range(3)]
            for text, mass in rest:
                wanted[text] += mass
        found = enumerate_joint(p, q, MultiDraw(draws), tree, Kind.DET)
        assert_close(found, wanted, atol=1e-12, rtol=0)


def greedy_draft(q: Callable[[tuple[int, ...]], Tensor], tree: Tree) -> list[int]:
    """The tokens of the only draft with `Kind.DET`: siblings from the most likely on."""
    text: dict[int, tuple[int, ...]] = {-1: ()}
    tokens: list[int] = []
    for node, parent in enumerate(tree.parents):
        order = q(text[parent]).sort(descending=True, stable=True).indices.tolist()
        tokens.append(order[tree.parents[:node].count(parent)])
        text[node] = (*text[parent], tokens[node])
    return tokens


def test_the_deepest_path_wins_and_the_likelier_of_those_as_deep() -> None:
    sure = Categorical.from_probs(vector(0.5, 0.5, 0.0).expand(1, 4, 3))
    draft = Draft.from_tree(Tree((-1, -1, 1)), torch.tensor([[0, 1, 0]]), Kind.DET)
    noise = KeyedNoise.from_seed(0, 1, torch.device("cpu"))
    scores = Scores(sure, torch.zeros(1, 4, dtype=torch.int64))
    verdict = MultiDraw(64).verify(draft, scores, noise)
    assert verdict.path.tolist() == [[1, 2]]
    flat = Draft.from_tree(Tree((-1, -1)), torch.tensor([[0, 1]]), Kind.DET)
    for likely in (0, 1):
        distribution_ = vector(0.4, 0.4, 0.1)
        distribution_[likely] += 0.1
        scores = Scores(
            Categorical.from_probs(distribution_.expand(1, 3, 3)), torch.zeros(1, 3).long()
        )
        assert MultiDraw(64).verify(flat, scores, noise).path.tolist() == [[likely]]


@dataclass(frozen=True)
class DrawnAnew(Verifier):
    """Wrong: samples the token after a miss again, independently of the first samples."""

    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.DET,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        verdict = MultiDraw(1).verify(draft, scores, noise)
        row = verdict.length  # of a chain
        weights = as_categorical(scores.distribution)[torch.arange(draft.batch), row].probs
        return Verdict(verdict.path, verdict.length, noise.pick(weights, Lane.RESIDUAL))


def test_a_token_drawn_anew_after_a_miss_is_biased_by_what_was_missed() -> None:
    found = enumerate_emitted(P, Q, DrawnAnew(), 1, Kind.DET)
    assert_close(found, P * 0.7 + vector(0, 0.3, 0), atol=1e-12, rtol=0)
    assert not torch.allclose(found, P)


def test_many_rounds_come_out_as_often_as_the_formula_predicts() -> None:
    """2e4 draws, 4 sigma: a false alarm in one of 5,000 runs for three cells."""
    count = 20_000
    scores = Scores(
        Categorical.from_probs(P.expand(count, 2, 3)), torch.zeros(count, 2, dtype=torch.int64)
    )
    draft = Draft.chain(torch.ones(count, 1, dtype=torch.int64), Kind.DET)
    noise = KeyedNoise.from_seed(1, count, torch.device("cpu"))
    verdict = MultiDraw(3).verify(draft, scores, noise)
    assert verdict.next is not None
    said = torch.where(verdict.length > 0, 1, verdict.next)
    share = said.bincount(minlength=3) / count
    wanted = enumerate_emitted(P, Q, MultiDraw(3), 1, Kind.DET)
    assert ((share - wanted).abs() < 4 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_one_draw_accepts_as_matching_does_and_none_is_refused() -> None:
    lengths = enumerate_rounds(P, Q, MultiDraw(1), Tree.chain(1), Kind.DET).lengths
    assert_close(lengths, vector(0.7, 0.3), atol=1e-12, rtol=0)
    assert MultiDraw(1).lossless
    assert not MultiDraw(2).lossless
    with pytest.raises(ValueError, match="draws=0"):
        MultiDraw(0)
