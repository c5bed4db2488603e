"""Acceptances and distributions with known closed forms, reproduced to 1e-12."""

from __future__ import annotations

from fractions import Fraction as F
from itertools import chain, combinations, permutations

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical, residual
from mmspec.draft import Kind, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.block import Block, path_ratio, scaled_residual, stopping_probability
from mmspec.verifiers.enumeration import (
    ancestral_joint,
    enumerate_emitted,
    enumerate_joint,
    enumerate_rounds,
    expected_accepted,
)
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.greedy_multidraft import GreedyMultiDraft
from mmspec.verifiers.kseq import KSeq, acceptance_ratio
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.longest import Longest
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.sample_and_match import SampleAndMatch
from mmspec.verifiers.spechub import SpecHub
from mmspec.verifiers.traversal import Traversal
from mmspec.verifiers.typical import Typical
from tests.covering import exhaustive


def vector(*parts: F | str) -> Tensor:
    return torch.tensor([float(F(part)) for part in parts], dtype=torch.float64)


E = {
    "E1": (vector("1/2", "3/10", "1/5"), vector("1/5", "1/2", "3/10")),
    "E2": (vector("0.40", "0.35", "0.15", "0.10"), vector("0.10", "0.20", "0.40", "0.30")),
    "E3": (vector("0.1", "0.2", "0.7"), vector("0.6", "0.3", "0.1")),
    "E4": (vector("0.60", "0.25", "0.10", "0.05"), vector("0.30", "0.40", "0.20", "0.10")),
}
TWO = (vector("1/3", "2/3"), vector("2/3", "1/3"))

ONE_POSITION: list[tuple[Verifier, Kind, int, dict[str, str]]] = [
    (Recursive(), Kind.IID, 1, {"E1": "7/10", "E2": "11/20", "E3": "2/5", "E4": "7/10"}),
    (Block(), Kind.IID, 1, {"E1": "7/10", "E2": "11/20", "E3": "2/5", "E4": "7/10"}),
    (Traversal(), Kind.IID, 1, {"E1": "7/10", "E2": "11/20", "E3": "2/5", "E4": "7/10"}),
    (KSeq(), Kind.IID, 1, {"E1": "7/10", "E2": "11/20", "E3": "2/5", "E4": "7/10"}),
    (GreedyMultiDraft(), Kind.HUB, 1, {"E1": "7/10", "E2": "11/20", "E3": "2/5", "E4": "7/10"}),
    (Recursive(), Kind.IID, 2, {"E1": "19/25", "E2": "137/200", "E3": "23/50"}),
    (Recursive(), Kind.IID, 3, {"E1": "101/125", "E2": "1553/2000", "E3": "257/500"}),
    (Recursive(), Kind.WOR, 2, {"E1": "283/350", "E2": "213/280", "E3": "151/280"}),
    (Recursive(), Kind.WOR, 3, {"E1": "1", "E2": "17/20", "E3": "1"}),
    (Recursive(), Kind.DET, 2, {"E1": "1/2", "E2": "1/4", "E3": "3/10"}),
    (SampleAndMatch(), Kind.DET, 2, {"E1": "1/2", "E2": "1/4", "E3": "3/10"}),
    (SampleAndMatch(), Kind.IID, 2, {"E1": "0.507", "E2": "0.349", "E3": "0.319"}),
    (SampleAndMatch(), Kind.IID, 3, {"E1": "0.6379", "E2": "0.4625", "E3": "0.4147"}),
    (SampleAndMatch(), Kind.WOR, 2, {"E1": "1763/2800", "E2": "2099/5040", "E3": "1907/4200"}),
    (SampleAndMatch(), Kind.WOR, 3, {"E1": "1", "E2": "3379/5040", "E3": "1"}),
    (SpecHub(), Kind.HUB, 2, {"E1": "9/10", "E2": "3/4", "E3": "11/20"}),
    (GreedyMultiDraft(), Kind.HUB, 2, {"E1": "9/10", "E2": "3/4", "E3": "11/20"}),
    (GreedyMultiDraft(), Kind.HUB, 3, {"E1": "1", "E2": "14/15", "E3": "1"}),
]


@pytest.mark.parametrize(("verifier", "kind", "siblings", "expected"), ONE_POSITION)
def test_one_position_accepts_as_in_the_table(
    verifier: Verifier, kind: Kind, siblings: int, expected: dict[str, str]
) -> None:
    for name, value in expected.items():
        p, q = E[name]
        assert expected_accepted(p, q, verifier, siblings, kind) == pytest.approx(
            float(F(value)), abs=1e-12
        )
        assert_close(enumerate_emitted(p, q, verifier, siblings, kind), p, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        (2, {"E1": (0.791355, 1.456776), "E2": (0.711216, 1.537386), "E3": (0.472621, 1.726209)}),
        (3, {"E1": (0.858519, 1.792593), "E2": (0.79395, 1.9395), "E3": (0.537184, 2.371843)}),
    ],
)
def test_k_seq_accepts_as_in_the_table(
    siblings: int, expected: dict[str, tuple[float, float]]
) -> None:
    for name, (value, rho) in expected.items():
        p, q = E[name]
        assert expected_accepted(p, q, KSeq(), siblings, Kind.IID) == pytest.approx(value, abs=1e-6)
        k = torch.full((1, 1), float(siblings), dtype=p.dtype)
        found = acceptance_ratio(p[None], q[None], k, siblings)
        assert found.item() == pytest.approx(rho, abs=1e-6)


@pytest.mark.parametrize(
    ("size", "bins"), [(4, 2**12), (1_000, 2**12), (20_000, 20_000), (150_000, 2**16)]
)
def test_the_ratio_of_k_seq_is_the_root_or_just_above_it_in_float32(size: int, bins: int) -> None:
    """Below the root the residual would be negative; far above it too few drafts are accepted."""
    k = torch.tensor([[2.0], [3.0], [8.0]])
    ramp = torch.linspace(0, 1 / size, size, dtype=torch.float64)

    def widen(one: Tensor, more: Tensor) -> Tensor:
        mixed = functional.pad(one, (0, size - len(one))) + more
        return (mixed / mixed.sum()).expand(3, -1)

    for one, other in (*E.values(), TWO):
        p, q = widen(one, ramp), widen(other, ramp.flip(0))
        root = acceptance_ratio(p, q, k.double(), 8)
        assert_close(_bisect_ratio(p, q, k.double()), root, atol=1e-9, rtol=0)
        above = acceptance_ratio(p.float(), q.float(), k, 8) - root
        assert bool((above >= -1e-6).all())
        assert bool((above <= 7 / bins + 1e-6).all())


def _bisect_ratio(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    low, high = torch.ones_like(k), k.clone()
    for _ in range(50):
        middle = (low + high) / 2
        beta = torch.minimum(q, p / middle).sum(-1, keepdim=True)
        below = middle * beta + (1 - beta) ** k < 1
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


GAMMAS: list[tuple[Verifier, tuple[Tensor, Tensor], dict[int, str]]] = [
    (Recursive(), TWO, {1: "2/3", 2: "10/9", 3: "38/27", 4: "130/81"}),
    (Block(), TWO, {1: "2/3", 2: "11/9", 3: "5/3", 4: "166/81"}),
    (Traversal(), TWO, {1: "2/3", 2: "11/9", 3: "5/3", 4: "166/81"}),
    (Recursive(), E["E1"], {1: "0.7", 2: "1.19", 3: "1.533", 4: "1.7731"}),
    (Block(), E["E1"], {1: "0.7", 2: "1.25", 3: "1.72", 4: "2.1141"}),
    (Recursive(), E["E2"], {2: "341/400", 3: "8151/8000"}),
    (Block(), E["E2"], {2: "187/200", 3: "9723/8000"}),
]


@pytest.mark.parametrize(("verifier", "pair", "expected"), GAMMAS)
def test_chains_accept_as_in_the_table(
    verifier: Verifier, pair: tuple[Tensor, Tensor], expected: dict[int, str]
) -> None:
    for gamma, value in expected.items():
        found = enumerate_rounds(*pair, verifier, Tree.chain(gamma), Kind.IID)
        assert float(found.lengths @ torch.arange(gamma + 1.0).double()) == pytest.approx(
            float(F(value)), abs=1e-12
        )
        assert_close(found.joint, ancestral_joint(pair[0], gamma + 1), atol=1e-12, rtol=0)


TREES: list[tuple[tuple[Tensor, Tensor], list[int], Kind, str, str]] = [
    (TWO, [1, 1], Kind.IID, "10/9", "11/9"),
    (TWO, [2, 1], Kind.IID, "35/27", "38/27"),
    (TWO, [2, 2], Kind.IID, "112/81", "118/81"),
    (TWO, [2, 1], Kind.WOR, "5/3", "16/9"),
    (TWO, [2, 2], Kind.WOR, "2", "2"),
    (E["E1"], [2, 1], Kind.IID, "1.292", "1.352"),
    (E["E1"], [2, 2], Kind.IID, "1.3376", "1.4456"),
    (E["E1"], [2, 1], Kind.WOR, "4811/3500", "5021/3500"),
    (E["E1"], [2, 2], Kind.WOR, "179139/122500", "47716/30625"),
]


@pytest.mark.parametrize(("pair", "widths", "kind", "recursive", "traversal"), TREES)
def test_trees_accept_as_in_the_table(
    pair: tuple[Tensor, Tensor], widths: list[int], kind: Kind, recursive: str, traversal: str
) -> None:
    tree = Tree.branching(widths)
    for verifier, value in ((Recursive(), recursive), (Traversal(), traversal)):
        found = expected_accepted(*pair, verifier, tree, kind)
        assert found == pytest.approx(float(F(value)), abs=1e-12)


def test_lenience_trades_exactness_for_acceptance() -> None:
    p, q = E["E1"]
    assert expected_accepted(p, q, Lenience(0.8)) == pytest.approx(33 / 40, abs=1e-12)
    assert_close(
        enumerate_emitted(p, q, Lenience(0.8)), vector("3/8", "3/8", "1/4"), atol=1e-12, rtol=0
    )
    assert expected_accepted(p, q, Lenience(0.5)) == pytest.approx(1, abs=1e-12)
    assert_close(enumerate_emitted(p, q, Lenience(0.5)), q, atol=1e-12, rtol=0)
    assert_close(enumerate_emitted(p, q, Lenience(1.0)), p, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("p", "threshold", "typical"),
    [
        (E["E1"][0], 0.09, [1, 1, 1]),
        (E["E4"][0], 0.09, [1, 1, 1, 0]),
        (vector("0.9", "0.05", "0.05"), 0.09, [1, 0, 0]),
        (vector("1", "0", "0"), 0.09, [1, 0, 0]),
        (vector(*["1/8"] * 8), 0.3 / 8, [1] * 8),  # exp(-H) is 1/8
        (vector("1/2", *["1/48"] * 24), 0.3 / 96**0.5, [1] + [0] * 24),
    ],
)
def test_typical_tokens(p: Tensor, threshold: float, typical: list[int]) -> None:
    rule, x = Typical(0.09, 0.3), torch.arange(len(p))
    assert rule.threshold(p).item() == pytest.approx(threshold, abs=1e-12)
    each = Categorical.from_probs(p.expand(len(p), -1))
    assert rule.accept(each, each, x).tolist() == typical
    cut = p * torch.tensor(typical)
    left = rule.residual(each, each, x).probs
    assert_close(left, (cut / cut.sum()).expand_as(left), atol=1e-12, rtol=0)


def test_a_token_at_the_threshold_is_not_typical() -> None:
    p = vector("1/2", "1/4", "1/4").expand(3, -1)
    rule, each, x = Typical(epsilon=0.25, delta=0.9), Categorical.from_probs(p), torch.arange(3)
    assert rule.threshold(p).tolist() == [0.25] * 3
    assert rule.accept(each, each, x).tolist() == [1, 0, 0]
    assert rule.residual(each, each, x).probs.tolist() == [[1, 0, 0]] * 3


def test_of_typical_paths_as_long_the_likelier_one_wins() -> None:
    p, q = vector("1/5", "1/2", "3/10"), vector("1/2", "3/10", "1/5")  # proposes 0, 1
    found = enumerate_rounds(p, q, Longest(Typical(0.09, 0.3)), Tree.branching([2]), Kind.DET)
    assert found.joint.sum(1)[1] == pytest.approx(1)


def test_the_longest_typical_path_wins_and_ends_in_a_typical_token() -> None:
    p, q = E["E4"][0], vector("0.05", "0.1", "0.25", "0.6")  # proposes 3, 2 in this order
    found = enumerate_rounds(p, q, Longest(Typical(0.09, 0.3)), Tree((-1, -1, 0, 1)), Kind.DET)
    assert_close(found.lengths, vector("0", "1", "0"))  # 2 is typical, 3 below it is not
    assert found.joint.sum((1, 2))[2] == pytest.approx(1)


def test_the_trace_of_block_verification() -> None:
    p, q = E["E1"]

    def ratios(*draft: int) -> Tensor:
        x = torch.tensor(draft)
        return path_ratio(p[x][None], q[x][None])[0]

    assert_close(ratios(1, 0), vector("1", "3/5", "1"))
    assert_close(ratios(1, 1), vector("1", "3/5", "9/25"))
    assert_close(ratios(2, 0), vector("1", "2/3", "1"))
    for rho, left, passing in (("3/5", "1/10", "1/5"), ("2/3", "2/15", "2/7")):
        mass = (float(F(rho)) * p - q).clamp_min(0).sum()
        assert_close(mass, vector(left)[0])
        assert_close(stopping_probability(mass, vector(rho)[0]), vector(passing)[0])
    assert_close(scaled_residual(p[None], q[None], vector("3/5"))[0], vector("1", "0", "0"))


def test_the_trace_of_recursive_residuals() -> None:
    p, q = E["E2"]
    second = residual(p, q)
    third = residual(second, q)
    assert_close(second, vector("2/3", "1/3", "0", "0"))
    assert_close(third, vector("17/21", "4/21", "0", "0"))
    chances = [float(torch.minimum(distribution_, q).sum()) for distribution_ in (p, second, third)]
    assert chances == pytest.approx([11 / 20, 3 / 10, 61 / 210], abs=1e-12)


def test_reductions_to_simpler_verifiers() -> None:
    p, q = E["E2"]
    for gamma in (1, 2, 3):
        tree = Tree.chain(gamma)
        block = enumerate_rounds(p, q, Block(), tree, Kind.IID)
        walked = enumerate_rounds(p, q, Traversal(), tree, Kind.IID)
        assert_close(walked.lengths, block.lengths, atol=1e-12, rtol=0)
        delta = enumerate_rounds(p, q, Block(), tree, Kind.DET)
        exact = enumerate_rounds(p, q, Recursive(), tree, Kind.DET)
        steps = torch.arange(gamma + 1.0).double()
        assert_close(delta.lengths @ steps, exact.lengths @ steps, atol=1e-12, rtol=0)
    for kind in (Kind.IID, Kind.WOR, Kind.DET):
        one = enumerate_rounds(p, q, Traversal(), 3, kind)
        assert_close(one.lengths, enumerate_rounds(p, q, Recursive(), 3, kind).lengths)
    hub = enumerate_rounds(p, q, GreedyMultiDraft(), Tree.branching([2, 2]), Kind.HUB)
    pair = enumerate_rounds(p, q, SpecHub(), Tree.branching([2, 2]), Kind.HUB)
    assert_close(hub.lengths, pair.lengths, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", exhaustive(E, ("E1", "E4")))
def test_acceptance_is_ordered(name: str) -> None:
    p, q = E[name]
    for kind in (Kind.IID, Kind.WOR):
        for k in (2, 3):
            least = expected_accepted(p, q, SampleAndMatch(), k, kind)
            middle = expected_accepted(p, q, Recursive(), k, kind)
            most = optimal_transport(p, q, k, kind)
            assert least <= middle + 1e-12 <= most + 2e-12
            if kind is Kind.IID:
                seq = expected_accepted(p, q, KSeq(), k, kind)
                assert (1 - (1 - 1 / k) ** k) * most - 1e-12 <= seq <= most + 1e-12
    for gamma in (1, 2, 3):
        tree = Tree.chain(gamma)
        exact, block = (expected_accepted(p, q, v, tree, Kind.IID) for v in (Recursive(), Block()))
        bound = sum(
            float(torch.minimum(ancestral_joint(p, i), ancestral_joint(q, i)).sum())
            for i in range(1, gamma + 1)
        )
        assert exact <= block + 1e-12 <= bound + 2e-12


def test_the_bound_of_optimal_transport_is_the_tabulated_one() -> None:
    for name, k, kind, value in (
        ("E1", 2, Kind.IID, "43/50"),
        ("E2", 3, Kind.IID, "871/1000"),
        ("E2", 2, Kind.WOR, "701/840"),
        ("E3", 2, Kind.WOR, "83/140"),
    ):
        assert optimal_transport(*E[name], k, kind) == pytest.approx(float(F(value)), abs=1e-12)


def optimal_transport(p: Tensor, q: Tensor, k: int, kind: Kind) -> float:
    """1 + min over token sets H of p(H) - Pr(all k drafts in H) (Hu et al. 2025)."""
    tokens = range(len(p))
    best = 0.0
    for inside in chain.from_iterable(combinations(tokens, size) for size in tokens):
        if kind is Kind.IID:
            caught = float(q[list(inside)].sum()) ** k
        else:
            caught = 0.0
            for draws in permutations(inside, k):
                chance, left = 1.0, 1.0
                for x in draws:
                    chance, left = chance * float(q[x]) / left, left - float(q[x])
                caught += chance
        best = min(best, float(p[list(inside)].sum()) - caught)
    return 1 + best


def test_a_rule_stands_for_its_walk() -> None:
    p, q = E["E3"]
    for siblings in (1, 2, 3):
        assert_close(enumerate_emitted(p, q, Exact(), siblings), p, atol=1e-12, rtol=0)
    assert_close(enumerate_joint(p, q, Exact(), Tree.chain(0)), p, atol=1e-12, rtol=0)
