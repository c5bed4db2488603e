"""Jacobi drafting reproduces the target's distribution; every known mistake is detected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.codes.phrases import Phrases, Trie
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise, Lane, Noise
from mmspec.draft import Draft, Kind, Round, Scores, Verifier
from mmspec.drafters.jacobi.suffix import (
    CoupleGumbel,
    CoupleMax,
    OneHotReuse,
    Resample,
    SuffixPolicy,
    ThresholdReuse,
    WindowSlots,
)
from mmspec.drafters.jacobi.tree import ProactiveTree
from mmspec.drafters.jacobi.window import Jacobi
from mmspec.drafters.plain import NoDraft
from mmspec.verifiers.block import Block
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.exact import Exact
from mmspec.verifiers.phrase import PhraseJoint
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.covering import exhaustive
from tests.drafters.tables import CPU, TableTarget, sample, z_score

TARGET = TableTarget(size=2, room=6, scale=2.0, seed=4)  # mistakes are large in this one
WIDE = TableTarget(size=3, room=5, scale=1.0, seed=1)
ROWS = 12_000
MANY = 40_000  # z grows with the rows: a third of the smallest of the known mistakes is seen
POLICIES: list[SuffixPolicy] = [
    Resample(),
    CoupleMax(),
    CoupleGumbel(),
    OneHotReuse(0.5),
]


@dataclass(frozen=True)
class OldDistribution:
    """Wrong: a token kept by coupling is stored with its old distribution."""

    records_distribution: ClassVar[bool] = False
    carries_tokens: ClassVar[bool] = True

    def redraw(self, slots: WindowSlots, noise: Noise) -> tuple[Tensor, Categorical]:
        tokens, _ = CoupleMax().redraw(slots, noise)
        kept = (
            noise.fresh_keys(Lane.OTHER, slots.position).uniform() < slots.ratio()
        ) & slots.known
        old = torch.where(kept[..., None], slots.q.scores, slots.p.scores)
        return tokens, Categorical(old)


class FreshAtTheRejection(Exact):
    """Wrong: commits a draw from p instead of the residual."""

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


@pytest.mark.parametrize("suffix", exhaustive(POLICIES, POLICIES[::2]), ids=repr)
def test_the_joint_distribution_is_the_target_s(suffix: SuffixPolicy) -> None:
    """Chi-square on all sequences; z > 3 has probability 0.4 % under the right distribution.

    Seeds are fixed, so a case that passes goes on passing.
    """
    assert abs(z_score(TARGET, Jacobi(5, suffix), Recursive(), ROWS)) < 3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("length", "proactive"),
    [(2, None), (5, None), (5, ProactiveTree(2, 2))],
    ids=["2", "5", "tree"],
)
@pytest.mark.parametrize("suffix", POLICIES, ids=repr)
def test_the_joint_distribution_on_many_rows(
    suffix: SuffixPolicy, length: int, proactive: ProactiveTree | None
) -> None:
    drafter = Jacobi(length, suffix, proactive=proactive)
    assert abs(z_score(TARGET, drafter, Recursive(), MANY, seed=1)) < 3


@pytest.mark.parametrize(
    ("target", "width"),
    [
        pytest.param(TARGET, 2, id="two", marks=pytest.mark.exhaustive),
        pytest.param(WIDE, 3, id="three"),
    ],
)
def test_the_joint_distribution_with_proactive_candidates(target: TableTarget, width: int) -> None:
    drafter = Jacobi(4, CoupleMax(), proactive=ProactiveTree(2, width))
    assert abs(z_score(target, drafter, Recursive(), ROWS)) < 3


WRONG: list[tuple[SuffixPolicy, Verifier, float]] = [
    (OldDistribution(), Recursive(), 4),
    (Resample(), Recursive(FreshAtTheRejection()), 50),
    (ThresholdReuse(0.5), Recursive(), 20),
]
SEEN = [WRONG[0], *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in WRONG[1:])]


@pytest.mark.parametrize(("suffix", "verifier", "least"), SEEN, ids=str)
def test_known_mistakes_are_seen(suffix: SuffixPolicy, verifier: Verifier, least: float) -> None:
    assert z_score(TARGET, Jacobi(5, suffix), verifier, ROWS) > least


def test_the_coupled_verifier_gives_what_plain_decoding_gives() -> None:
    plain, _ = sample(TARGET, NoDraft(), Coupled(), 2000, seed=3)
    for suffix in (*POLICIES, ThresholdReuse(0.5)):  # no wrong distribution matters to it
        drawn, _ = sample(TARGET, Jacobi(4, suffix), Coupled(), 2000, seed=3)
        assert drawn == plain


@pytest.mark.parametrize("proactive", [None, ProactiveTree(2, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("suffix", POLICIES, ids=repr)
def test_greedy_output_is_plain_greedy(
    suffix: SuffixPolicy, proactive: ProactiveTree | None
) -> None:
    plain, _ = sample(WIDE, NoDraft(), Recursive(), 4, greedy=True)
    drafter = Jacobi(3, suffix, proactive=proactive)
    drawn, rounds = sample(WIDE, drafter, Recursive(), 4, greedy=True)
    assert drawn == plain
    assert len(rounds) <= WIDE.room


def test_a_window_of_nothing_is_plain_decoding() -> None:
    plain, _ = sample(TARGET, NoDraft(), Recursive(), 500)
    drawn, rounds = sample(TARGET, Jacobi(0), Recursive(), 500)
    assert drawn == plain
    assert len(rounds) == TARGET.room


def test_reuse_beyond_every_ratio_is_resampling() -> None:
    expected, _ = sample(TARGET, Jacobi(4), Recursive(), 2000)
    for reuse in (ThresholdReuse(float("inf")), OneHotReuse(float("inf"))):
        assert sample(TARGET, Jacobi(4, reuse), Recursive(), 2000)[0] == expected
    assert sample(TARGET, Jacobi(4, OneHotReuse(0.5)), Recursive(), 2000)[0] != expected


def test_one_candidate_is_maximal_coupling() -> None:
    expected, _ = sample(WIDE, Jacobi(4, CoupleMax()), Recursive(), 2000)
    single = Jacobi(4, CoupleMax(), proactive=ProactiveTree(3, 1))
    assert sample(WIDE, single, Recursive(), 2000)[0] == expected
    more = Jacobi(4, CoupleMax(), proactive=ProactiveTree(3, 3))
    drawn, rounds = sample(WIDE, more, Recursive(), 2000)
    assert drawn != expected
    _, before = sample(WIDE, single, Recursive(), 2000)
    assert count_accepted(rounds) > count_accepted(before)  # candidates are for that


def count_accepted(rounds: list[Round]) -> int:
    return sum(sum(kept.accepted) for kept in rounds)


def test_no_phrases_is_sjd() -> None:
    expected, _ = sample(TARGET, Jacobi(4), Recursive(), 2000)
    empty = PhraseJoint(Trie.build(Phrases(), TARGET.size, CPU))
    assert sample(TARGET, Jacobi(4), empty, 2000)[0] == expected


def test_without_context_every_carried_token_is_accepted() -> None:
    target = TableTarget(size=3, room=7, forgetful=True)
    for suffix in (Resample(), CoupleMax(), CoupleGumbel()):
        _, rounds = sample(target, Jacobi(4, suffix), Recursive(), 300)
        carried = [0] * 300
        for kept in rounds[1:]:
            for row, count in enumerate(kept.accepted):
                if kept.tokens[row] and not kept.finished[row]:
                    assert count >= min(carried[row], kept.drafted[row])
                    carried[row] = kept.drafted[row] - count
        assert len(rounds) < target.room


def slots(rows: int, p: Tensor, q: Tensor, seed: int = 0) -> tuple[WindowSlots, KeyedNoise]:
    """One slot in many rows whose token was drawn from q."""
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(seed))
    noise = KeyedNoise(keys)
    position = torch.full((rows, 1), 7)
    distribution_q, distribution_p = (
        Categorical.from_weights(distribution.expand(rows, 1, -1)) for distribution in (q, p)
    )
    tokens = distribution_q.sample(noise.shared_keys(position))
    return WindowSlots(
        distribution_p, distribution_q, tokens, torch.ones(rows, 1).bool(), position
    ), noise


P, Q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])  # two in (P - Q)+
DISTANCE = float((P - Q).abs().sum() / 2)


def kept_share(suffix: SuffixPolicy, rows: int = 40_000) -> float:
    before, noise = slots(rows, P, Q)
    tokens, distribution = suffix.redraw(before, noise.at_round(1))
    counts = torch.bincount(tokens[:, 0], minlength=len(P)) / rows
    assert torch.allclose(counts, P, atol=0.012)  # five standard deviations
    assert torch.equal(distribution.probs, before.p.probs)
    return float((tokens == before.tokens).float().mean())


def test_how_many_tokens_each_coupling_keeps() -> None:
    """40 000 rows: a share is off by 0.0025 at one standard deviation."""
    assert kept_share(CoupleMax()) == pytest.approx(1 - DISTANCE, abs=0.01)
    gumbel = kept_share(CoupleGumbel())
    assert (1 - DISTANCE) / (1 + DISTANCE) - 0.01 < gumbel < 1 - DISTANCE + 0.01
    assert kept_share(Resample()) == pytest.approx(float((P * Q).sum()), abs=0.01)


def test_equal_distributions_change_no_token() -> None:
    for suffix in (CoupleMax(), CoupleGumbel()):
        before, noise = slots(1000, P, P)
        tokens, _ = suffix.redraw(before, noise.at_round(1))
        assert torch.equal(tokens, before.tokens)


def test_a_token_is_reused_only_beyond_the_threshold() -> None:
    for suffix in (ThresholdReuse(1.0), OneHotReuse(1.0)):
        before, noise = slots(1000, P, P)  # p/q is 1 everywhere
        tokens, _ = suffix.redraw(before, noise.at_round(1))
        assert float((tokens == before.tokens).float().mean()) < 0.5


@pytest.mark.parametrize(("depth", "width"), [(3, 4), (2, 3)])
def test_the_recipe_s_window_has_its_candidates(depth: int, width: int) -> None:
    fast = mmspec.accelerate(toys.model("llama"), "sjd-pac", length=6, depth=depth, width=width)
    request = toys.inputs("llama")
    rounds = list(fast.stream(**request, max_new_tokens=12, temperature=1.0, seed=0))
    most = max(turn.drafted[0] for turn in rounds)  # guesses of the first round stand alone
    assert most == 6 + depth * (width - 1)


@pytest.mark.exhaustive
def test_a_verifier_that_looks_ahead_spoils_what_is_carried() -> None:
    """Block verification has looked at the second token of a draft before it rejects the first.

    40 000 rows, of which those count that kept nothing: five standard deviations are below 0.02.
    The second distribution gives token 1 a probability of 0.7; behind a block it comes out with
    0.58.
    """
    rows = 40_000
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(5))
    noise = KeyedNoise(keys)
    p = torch.tensor([[0.4, 0.6], [0.3, 0.7], [0.5, 0.5]])
    q = torch.tensor([[0.8, 0.2], [0.5, 0.5]])
    distribution_p, distribution_q = (
        Categorical.from_weights(distribution.expand(rows, -1, -1)) for distribution in (p, q)
    )
    tokens = distribution_q.sample(noise.fresh_keys(Lane.DRAFT, torch.arange(2)))
    draft = Draft.chain(tokens, Kind.IID, distribution_q)
    position = torch.arange(3).expand(rows, -1)
    known = torch.ones(rows, 1).bool()
    before = WindowSlots(
        distribution_p[:, 1:2], distribution_q[:, 1:2], tokens[:, 1:], known, position[:, 1:2]
    )
    after, _ = CoupleMax().redraw(before, noise)
    for verifier, share in ((Recursive(), 0.7), (Block(), 0.58)):
        refused = verifier.verify(draft, Scores(distribution_p, position), noise).length == 0
        assert int(refused.sum()) > 15_000
        assert float(after[refused].float().mean()) == pytest.approx(share, abs=0.02)


def test_coupling_and_looking_ahead_are_not_combined() -> None:
    model = toys.model("llama")
    for recipe in ("mc-sjd", "mc-sjd-gumbel", "sjd-pp"):
        with pytest.raises(
            ValueError, match="Block decides about a token by looking at later ones"
        ):
            mmspec.accelerate(model, recipe, verifier="block")
    mmspec.accelerate(model, "sjd", verifier="block")  # nothing is carried there


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_gumbel_sharing_and_the_coupled_verifier_on_a_model(family: str) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=3, ragged=True)
    fast = mmspec.accelerate(model, "mc-sjd-gumbel", verifier="coupled", length=5)
    for seed in range(2):
        settings = {"max_new_tokens": 12, "temperature": 0.3, "seed": seed}
        plain = mmspec.decode_plain(model, **request, **settings)
        out = fast.generate(**request, **settings)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, plain.sequences)


def test_the_published_reuse_is_reported_as_lossy() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    for reuse, exact in (("one-hot", True), ("published", False)):
        fast = mmspec.accelerate(model, "sjd-pp", reuse=reuse)
        assert fast.generate(**request, max_new_tokens=4).stats.exact is exact
    with pytest.raises(ValueError, match=r"reuse='x' is not known; choose one of one-hot"):
        mmspec.accelerate(model, "sjd-pp", reuse="x")
    with pytest.raises(ValueError, match="initial='x' is not known; choose one of random, left"):
        mmspec.accelerate(model, "sjd", initial="x")
    with pytest.raises(ValueError, match="a Jacobi window is a chain"):
        mmspec.accelerate(model, "sjd", tree=[2, 2])
    with pytest.raises(ValueError, match="tau=-1 is not a bound"):
        ThresholdReuse(-1)
    with pytest.raises(ValueError, match="width=0 are not the size of a tree"):
        ProactiveTree(3, 0)
