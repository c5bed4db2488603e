"""Distributions: samples follow probabilities, and residuals are (p - q)+ normalised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical, residual
from mmspec.distributions.noise import KeyedNoise, Keys, quantile

CPU = torch.device("cpu")
COUNT = 40_000


def keys(count: int = COUNT, seed: int = 0) -> Keys:
    noise = KeyedNoise.from_seed(seed, 1, CPU).shared_keys(torch.arange(count)[None])
    return Keys(noise.key[0])


def test_a_categorical_distribution_is_normalised_on_use() -> None:
    distribution = Categorical(torch.tensor([[1.0, 2.0, 3.0, -torch.inf]]) + 70)
    assert distribution.batch == (1,)
    assert distribution.size == 4
    expected = torch.tensor([[1.0, 2.0, 3.0, -torch.inf]]).softmax(-1)
    assert_close(distribution.probs, expected)
    assert_close(distribution.log_probs.exp(), expected)
    assert_close(distribution.log_prob(torch.tensor([1])), expected[:, 1].log())
    assert_close(Categorical.from_weights(7 * expected).probs, expected)


def test_a_point_mass_keeps_its_ranking() -> None:
    distribution = Categorical(torch.tensor([[0.1, 0.7, 0.2]]), hard=True)
    assert distribution.probs.tolist() == [[0, 1, 0]]
    assert distribution.log_probs.tolist() == [[-torch.inf, 0, -torch.inf]]
    assert distribution.sample(keys(1)).tolist() == [1]
    assert distribution.perturb(keys(1)).argsort(descending=True).tolist() == [[1, 2, 0]]
    assert float(distribution.entropy()) == pytest.approx(0, abs=1e-6)


def test_given_probabilities_are_handed_back_bit_for_bit() -> None:
    probs = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    distribution = Categorical.from_probs(probs)
    assert distribution.probs is probs
    assert (distribution.batch, distribution.size) == ((2, 3), 7)
    assert torch.equal(distribution[:, 1:].probs, probs[:, 1:])
    assert torch.equal(distribution[:, 1:].scores, probs[:, 1:].log())
    x = probs.argmax(-1)
    assert torch.equal(distribution.prob(x), probs.amax(-1))
    assert torch.equal(distribution.mode, x)
    assert torch.equal(
        distribution.sample(Keys(x)), Categorical.from_weights(probs).sample(Keys(x))
    )


@pytest.mark.parametrize("hard", [False, True])
def test_parts_of_an_evaluated_distribution_take_its_probabilities_along(hard: bool) -> None:
    distribution = Categorical(torch.randn(2, 3, 7), hard)
    known = distribution.evaluate()
    assert known.scores is distribution.scores
    assert known.hard is hard
    part = known[:, 1]
    assert part.known_probs is not None
    assert torch.equal(part.probs, distribution.probs[:, 1])
    assert torch.equal(part.scores, distribution.scores[:, 1])
    assert torch.equal(part.perturb(keys(2)), distribution[:, 1].perturb(keys(2)))
    wide = distribution.evaluate(torch.zeros(1, dtype=torch.float64))
    assert torch.equal(wide.probs, distribution.probs.double())


def test_what_is_left_of_a_point_mass_is_that_point_mass() -> None:
    distribution = Categorical(torch.randn(4, 7), hard=True)
    for q in (torch.rand(4, 7).softmax(-1), distribution.probs):
        assert distribution.residual(Categorical.from_probs(q)) is distribution
        assert torch.equal(distribution.probs, residual(distribution.probs, q))


def test_distributions_are_chosen_entry_by_entry() -> None:
    chosen = torch.tensor([True, False])
    soft, other = (
        Categorical(torch.randn(2, 5)),
        Categorical.from_probs(torch.rand(2, 5).softmax(-1)),
    )
    assert Categorical.where(chosen, soft, soft) is soft
    mixed = Categorical.where(chosen, soft, other)
    assert torch.equal(mixed.probs, torch.stack((soft.probs[0], other.probs[1])))
    assert torch.equal(mixed.scores, torch.stack((soft.scores[0], other.scores[1])))
    hard, second = (Categorical(torch.randn(2, 5), hard=True) for _ in range(2))
    ranked = Categorical.where(chosen, hard, second)
    assert ranked.hard
    assert torch.equal(ranked.probs, torch.stack((hard.probs[0], second.probs[1])))
    assert torch.equal(ranked.scores, torch.stack((hard.scores[0], second.scores[1])))
    met = Categorical.where(chosen, hard, soft)
    assert not met.hard
    assert torch.equal(met.probs, torch.stack((hard.probs[0], soft.probs[1])))
    assert met.sample(keys(2))[0] == hard.mode[0]


def test_entropy_is_that_of_the_distribution() -> None:
    distribution = Categorical(
        torch.tensor([[0.0, 0.0, -torch.inf], [5.0, -torch.inf, -torch.inf]])
    )
    assert_close(distribution.entropy(), torch.tensor([2.0, 1.0]).log(), atol=1e-6, rtol=0)


def test_indexing_stacking_and_joining_act_on_the_batch() -> None:
    scores = torch.randn(2, 3, 5)
    distribution = Categorical(scores, hard=True)
    assert distribution[:, 0].batch == (2,)
    assert distribution[:, [0, 2]].hard
    columns = [distribution[:, step] for step in range(3)]
    assert_close(Categorical.stack(columns).scores, scores)
    assert_close(Categorical.cat([distribution[:, :1], distribution[:, 1:]]).scores, scores)
    assert Categorical.cat([distribution]) is distribution
    assert Categorical.stack(columns).hard


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]),
        ([0.5, 0.4, 0.1], [0.1, 0.2, 0.7], [2 / 3, 1 / 3, 0.0]),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]),  # nothing left: p itself
        ([0.5, 0.3, 0.2], [0.0, 0.0, 1.0], [0.625, 0.375, 0.0]),
    ],
)
def test_a_residual_is_what_p_has_more(
    p: list[float], q: list[float], expected: list[float]
) -> None:
    wide = [torch.tensor(row, dtype=torch.float64) for row in (p, q, expected)]
    assert_close(residual(wide[0], wide[1]), wide[2], atol=1e-12, rtol=0)
    distribution = Categorical.from_weights(wide[0]).residual(Categorical.from_weights(wide[1]))
    assert_close(distribution.probs, wide[2], atol=1e-12, rtol=0)


def test_rejection_with_the_residual_gives_p_back() -> None:
    p, q = (torch.rand(50, 7, dtype=torch.float64) for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    kept = torch.minimum(p, q)
    back = kept + (1 - kept.sum(-1, keepdim=True)) * residual(p, q)
    assert_close(back, p, atol=1e-12, rtol=0)


def test_a_token_has_a_share_of_the_quantiles_that_is_its_weight() -> None:
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0, 4.0, 0.0], [8.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    uniform = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    found = quantile(weights, uniform.expand(2, -1))
    counts = [torch.bincount(row, minlength=6).tolist() for row in found]
    assert counts == [[0, 3000, 0, 1000, 4000, 0], [8000, 0, 0, 0, 0, 0]]
    assert quantile(weights[:1], torch.ones(1, 1, dtype=torch.float64)).item() < 6


def test_the_same_keys_couple_two_distributions() -> None:
    """Gumbel-max coupling: equal distributions draw equal tokens, near ones nearly always."""
    scores = torch.randn(6)
    p = Categorical(scores.expand(COUNT, -1))
    same = Categorical(scores.expand(COUNT, -1) + 3)
    near = Categorical((scores + 0.05 * torch.randn(6)).expand(COUNT, -1))
    assert torch.equal(p.sample(keys()), same.sample(keys()))
    agreement = float((p.sample(keys()) == near.sample(keys())).float().mean())
    assert 0.95 < agreement < 1
    # sum_x 1 / sum_z max(p_z / p_x, q_z / q_x) (Daliri et al. 2025); standard error below 0.001
    a, b = p.probs[0], near.probs[0]
    worst = torch.maximum(a[None] / a[:, None], b[None] / b[:, None])
    assert agreement == pytest.approx(float((1 / worst.sum(-1)).sum()), abs=0.006)


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))
