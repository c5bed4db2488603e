"""The distance of a relaxed rule: closed forms, and the reported excess of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.decode import make_round
from mmspec.distributions.categorical import Categorical, residual
from mmspec.distributions.noise import KeyedNoise, Noise
from mmspec.draft import Draft, Kind, Round, Scores, Verdict, Verifier
from mmspec.targets.stop import Stop
from mmspec.trees import Tree
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.distances import excess, measure, over_accepted, total_variation
from mmspec.verifiers.enumeration import enumerate_emitted
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.grouped import Grouped, RankWindow
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.unchecked import Unchecked
from tests import toys
from tests.covering import covering
from tests.partners import noisy
from tests.verifiers.random_distributions import distributions


@dataclass(frozen=True)
class FixedRule:
    """A rule with a given acceptance per token, and a given correction."""

    chances: Tensor  # (V,)
    correction: Tensor  # (V,)
    lossless: ClassVar[bool] = False

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        return self.chances[x]

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return Categorical.from_probs(self.correction.expand_as(p.probs))


def test_the_output_is_what_enumeration_finds() -> None:
    generator = torch.Generator().manual_seed(2)
    for p, q in zip(*distributions(5, 6), strict=True):
        chances, correction = torch.rand(2, 6, generator=generator).double()
        rule = FixedRule(chances, correction / correction.sum())
        step = measure(rule, p, q)
        assert_close(step.output, enumerate_emitted(p, q, rule, kind=Kind.IID), atol=1e-12, rtol=0)
        rejected = 1 - (q * chances).sum()
        assert_close(step.rejected, rejected)
        assert_close(step.output, q * chances + rejected * rule.correction)


def test_relaxed_acceptance_with_the_optimal_residual_is_off_by_what_it_over_accepts() -> None:
    generator = torch.Generator().manual_seed(3)
    for p, q in zip(*distributions(20, 9), strict=True):
        vanilla = (p / q).clamp_max(1)
        chances = vanilla + torch.rand(9, generator=generator).double() * (1 - vanilla)
        step = measure(FixedRule(chances, residual(p, q)), p, q)
        assert_close(step.distance, step.over_accepted, atol=1e-14, rtol=0)
        assert_close(step.rejected, total_variation(p, q) - step.over_accepted)
        assert 0 < step.over_accepted < total_variation(p, q)


def test_no_correction_brings_the_distance_below_the_over_accepted_mass() -> None:
    generator = torch.Generator().manual_seed(4)
    worse = 0
    for p, q in zip(*distributions(20, 5), strict=True):
        chances, correction = torch.rand(2, 5, generator=generator).double()
        step = measure(FixedRule(chances, correction / correction.sum()), p, q)
        assert step.distance >= step.over_accepted - 1e-14
        worse += bool(step.distance > step.over_accepted + 1e-3)
    assert worse > 0


def test_the_ends_of_the_scale() -> None:
    p, q = distributions(4, 7)
    exact = measure(Exact(), p, q)
    assert_close(exact.output, p, atol=1e-14, rtol=0)
    assert_close(exact.over_accepted, torch.zeros(4).double(), atol=1e-15, rtol=0)
    everything = measure(Lenience(1e-9), p, q)
    assert_close(everything.output, q)
    assert_close(everything.over_accepted, total_variation(p, q))
    assert_close(over_accepted(p, q, torch.ones_like(p)), total_variation(p, q))


def test_chunks_change_nothing() -> None:
    p, q = distributions(3, 11)
    whole, parts = (measure(Lenience(0.6), p, q, chunk) for chunk in (11, 4))
    assert_close(whole.output, parts.output, atol=1e-15, rtol=0)
    assert torch.equal(whole.accept, parts.accept)


def test_single_tests_estimate_the_mass() -> None:
    p, q = distributions(6, 8)
    x = torch.arange(8).expand(6, -1)
    wanted, proposed = (one[:, None].expand(-1, 8, -1) for one in (p, q))
    rule = Lenience(0.7)
    chances = rule.accept(Categorical.from_probs(wanted), Categorical.from_probs(proposed), x)
    single = excess(wanted, proposed, x, chances)
    assert_close((q * single).sum(-1), measure(rule, p, q).over_accepted, atol=1e-14, rtol=0)


def test_the_reported_mass_is_never_below_the_distance() -> None:
    """Windows refuse some tokens more often than speculative sampling does, which counts too."""
    beyond = 0
    for seed, size in product(range(8), (3, 5, 9, 17, 40)):
        p, q = distributions(20, size, seed)
        x = torch.arange(size).expand(20, -1)
        wanted, proposed = (one[:, None].expand(-1, size, -1) for one in (p, q))
        for rule in (Grouped(RankWindow(14)), Grouped(RankWindow(4, gap=0.5))):
            step = measure(rule, p, q)
            told = (q * excess(wanted, proposed, x, step.accept)).sum(-1)
            assert bool((step.distance <= told + 1e-12).all())
            beyond += int((step.distance > step.over_accepted + 1e-12).sum())
    assert beyond > 40


@pytest.mark.parametrize("kind", Unchecked.kinds)
def test_an_unchecked_draft_reports_its_distance(kind: Kind) -> None:
    """With its distributions a total variation, without them a bound of it."""
    p, q = (one[:1] for one in distributions(1, 5, seed=3))
    x = torch.arange(5)[:, None]
    scores = Scores(Categorical.from_weights(p.expand(5, 2, -1)), torch.arange(2).expand(5, -1))
    noise = KeyedNoise.from_seed(0, 5, p.device)
    told = []
    for drafted in (Categorical.from_weights(q.expand(5, 1, -1)), None):
        verdict = Unchecked().verify(Draft.chain(x, kind, drafted), scores, noise)
        assert verdict.excess is not None
        told.append(float((q[0] * verdict.excess).sum()))
    bound = float((q * (1 - p)).sum())
    off = float(total_variation(p, q))
    assert told == pytest.approx([bound if kind is Kind.DET else off, bound])
    assert off < bound


@dataclass
class RecordingVerifier(Verifier):
    """A verifier that sums probability times measured mass during enumeration."""

    verifier: Recursive
    p: Tensor
    q: Tensor
    mean: Tensor
    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = tuple(Kind)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        verdict = self.verifier.verify(draft, scores, noise)
        assert verdict.excess is not None
        chance = torch.ones(draft.batch, dtype=torch.float64)
        spare = torch.ones_like(chance)
        for x in draft.tokens.unbind(1):
            if draft.kind is not Kind.DET:
                chance = chance * self.q[x] / (spare if draft.kind is Kind.WOR else 1)
            spare = spare - self.q[x]
        self.mean += (chance * noise.chance * verdict.excess).sum()  # type: ignore[attr-defined]
        return verdict


@pytest.mark.parametrize(
    ("kind", "rule"),
    covering(
        [Kind.IID, Kind.WOR, Kind.DET],
        [Lenience(0.7), Annealed(2.0), Annealed(1.4, nu=0)],
        strength=1,
    ),
    ids=repr,
)
def test_a_walk_measures_what_its_output_is_off_by(rule: Lenience | Annealed, kind: Kind) -> None:
    """With one proposal it is the distance itself, with siblings a bound of it."""
    for p, q in zip(*distributions(4, 5, seed=8), strict=True):
        for siblings in (1, 2, 3):
            recorded = RecordingVerifier(Recursive(rule), p, q, torch.zeros(()).double())
            off = total_variation(enumerate_emitted(p, q, recorded, siblings, kind), p)
            assert off <= recorded.mean + 1e-12
            assert recorded.mean > 1e-3
            if siblings == 1:
                assert_close(recorded.mean, off, atol=1e-12, rtol=0)


def test_a_chain_adds_up_the_tokens_it_tested() -> None:
    p, q = (one.float() for one in distributions(4, 5, seed=1))
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (4, 3), generator=random)
    weights = [p[:, None].expand(-1, 4, -1), q[:, None].expand(-1, 3, -1)]
    target, drafted = (Categorical.from_weights(one) for one in weights)
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    draft = Draft.chain(tokens, Kind.IID, drafted, mask)
    scores = Scores(target, torch.arange(4).expand(4, -1))
    rule = Lenience(0.5)
    seen = set()
    for seed in range(20):
        verdict = Recursive(rule).verify(draft, scores, KeyedNoise.from_seed(seed, 4, p.device))
        assert verdict.excess is not None
        for row in range(4):
            length = int(verdict.length[row])
            tested = [int(x) for x in tokens[row, : length + 1][mask[row, : length + 1]]]
            ratio = p[row] / q[row]
            over = (2 * ratio).clamp_max(1) - ratio.clamp_max(1)  # acceptance at ell = 1/2
            wanted = float(over[tested].sum())
            assert float(verdict.excess[row]) == pytest.approx(wanted, abs=1e-6)
            seen.add((row, length))
    assert len(seen) > 5


def test_untested_siblings_add_no_mass() -> None:
    """The first of two siblings is taken, for sure; padding is no sibling at all."""
    tree = Tree.branching([2])
    p, q = torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.25, 0.25, 0.25, 0.25])
    target, drafted = (
        Categorical.from_weights(one.expand(2, n, -1)) for one, n in ((p, 3), (q, 2))
    )
    mask = torch.tensor([[True, True], [False, False]])
    draft = Draft.from_tree(tree, torch.tensor([[0, 1], [2, 3]]), Kind.WOR, drafted, mask)
    scores = Scores(target, torch.arange(3).expand(2, -1))
    verdict = Recursive(Grouped(RankWindow(0))).verify(
        draft, scores, KeyedNoise.from_seed(0, 2, p.device)
    )
    assert verdict.excess is not None
    assert verdict.length.tolist() == [1, 0]
    assert verdict.excess.tolist() == [0, 0]


def test_exact_rules_measure_nothing() -> None:
    p, q = distributions(2, 5)
    target, drafted = (
        Categorical.from_weights(one[:, None].expand(-1, n, -1)) for one, n in ((p, 3), (q, 2))
    )
    draft = Draft.chain(torch.zeros(2, 2, dtype=torch.int64), Kind.IID, drafted)
    scores = Scores(target, torch.arange(3).expand(2, -1))
    noise = KeyedNoise.from_seed(0, 2, p.device)
    assert Recursive().verify(draft, scores, noise).excess is None
    assert Recursive(Lenience(0.5)).verify(draft, scores, noise).excess is not None


@dataclass(frozen=True)
class Standing:
    """What `settle` asks of a context: two rows, the second finished."""

    finished: Sequence[bool] = (False, True)

    def num_generated(self, row: int) -> int:
        return 0

    def prefix(self, row: int) -> Tensor:
        return torch.zeros(0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("event", [(), (2,)], ids=["ids", "vectors"])
def test_the_mass_comes_along_with_the_verdict(event: tuple[int, ...], padded: bool) -> None:
    tokens = torch.arange(4).reshape(2, 2)
    tokens = tokens if not event else tokens[..., None].expand(2, 2, *event).float()
    mask = torch.ones(2, 2, dtype=torch.bool) if padded else None
    draft = Draft.chain(tokens, Kind.DET, mask=mask)
    next_ = tokens[:, 0]
    verdict = Verdict(torch.tensor([[0, -1], [0, 1]]), torch.tensor([1, 2]), next_)
    stop = Stop(8)

    def settled(verdict: Verdict) -> Round:
        return make_round(1, Standing(), draft, None, verdict, stop)  # type: ignore[arg-type]

    plain = settled(verdict)
    assert plain.excess is None
    measured = settled(replace(verdict, excess=torch.tensor([0.3, 0.7])))
    assert measured.excess == pytest.approx((0.3, 0.0), abs=1e-7)  # a finished row has no part
    assert (measured.path, measured.drafted) == (plain.path, plain.drafted)
    assert measured.path == ((0,), ())
    if not event:
        assert measured.tokens == plain.tokens == ((0, 0), ())


def test_a_run_reports_its_distance_and_an_exact_one_has_none() -> None:
    model, request = toys.model("llava"), toys.inputs("llava", batch=2)
    found = {}
    for name in ("lenience", "cool-sd", "speculative-sampling"):
        fast = mmspec.accelerate(model, name, drafter=noisy("llava", scale=0.3))
        rounds = list(fast.stream(**request, max_new_tokens=12, temperature=1.0, seed=2))
        assert fast.last_stats is not None
        found[name] = fast.last_stats.over_accepted_mass
        masses = [sum(kept.excess) for kept in rounds if kept.excess is not None]
        if recipes.get(name).exact:
            assert not masses
            continue
        emitted = sum(len(row) for kept in rounds if kept.calls for row in kept.tokens)
        assert found[name] == pytest.approx(sum(masses) / emitted)
    assert found["speculative-sampling"] is None
    assert found["lenience"] is not None
    assert 0 < found["lenience"] < 1
    assert found["cool-sd"] is not None
    assert 0 < found["cool-sd"] < 1
