"""Reflection samples the target, has maximal acceptance, and moves states along one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.gaussian import DrivingNoise, Gaussian
from mmspec.distributions.noise import KeyedNoise, Lane, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers.gaussian_steps import (
    GaussianSteps,
    accept_chain,
    align_steps,
    dot,
    expand_event,
    sample_target,
)
from mmspec.verifiers.reflection import Reflection, acceptance, mirror
from tests.verifiers.gaussian_rounds import (
    BENT,
    RoundOutcome,
    apart,
    check_acceptance,
    check_coupling,
    check_distribution,
    check_joint,
    check_untouched,
    make_draft,
    overlap,
    play,
)

N = {1: 40_000, 6: 20_000, 64: 5_000}


@pytest.mark.parametrize("d", N)
@pytest.mark.parametrize("r", [0.3, 1.0, 2.0, 3.0])
def test_states_have_the_target_distribution_and_the_greatest_acceptance(r: float, d: int) -> None:
    case = apart(r, d)
    played = play(Reflection(), case, N[d])
    check_distribution(played, case)
    check_acceptance(played, overlap(r))
    check_untouched(played, case)
    check_coupling(played, case)


@pytest.mark.parametrize("r", [0.0, 1e-20, 1e-8])
def test_equal_distributions_are_always_accepted(r: float) -> None:
    played = play(Reflection(), apart(r, 6), 5_000)
    assert bool((played.length == 1).all())
    assert bool(played.following.isfinite().all())


def test_far_drafts_are_refused_and_the_states_stay_exact() -> None:
    case = apart(60.0, 6)
    played = play(Reflection(), case, 20_000)
    assert not bool(played.length.any())
    check_distribution(played, case)


@pytest.mark.parametrize(("d", "kind"), [(1, Kind.RACE), (2, Kind.IID)])
def test_a_chain_whose_means_depend_on_the_states_is_exact_jointly(d: int, kind: Kind) -> None:
    check_joint(play(Reflection(), replace(BENT, d=d, kind=kind), 60_000))
    check_joint(play(Reflection(), replace(BENT, d=d, kind=kind, ragged=True), 40_000))


@dataclass(frozen=True)
class Wrong(Verifier):
    """Reflection with one mistake; the tests above must find it."""

    lossless: ClassVar[bool] = False
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.IID)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        step = self.recover(align_steps(self, draft, scores), draft)
        hits = noise.flip(self.chance(step), Lane.ACCEPT)
        length = hits.cumprod(-1).sum(-1)
        state = self.correct(step.at(length.clamp_max(draft.nodes - 1)), noise)
        full = expand_event(length == draft.nodes, state) > 0
        return accept_chain(
            draft, length, torch.where(full, sample_target(scores, length, noise), state)
        )

    def recover(self, step: GaussianSteps, draft: Draft) -> GaussianSteps:
        return step

    def chance(self, step: GaussianSteps) -> Tensor:
        return acceptance(step)

    def correct(self, step: GaussianSteps, noise: Noise) -> Tensor:
        return mirror(step)


class AroundTheDraft(Wrong):
    """Adds the reflected noise to the draft's mean."""

    def correct(self, step: GaussianSteps, noise: Noise) -> Tensor:
        return mirror(step) - step.p.mean + step.q.mean


class KeepsTheNoise(Wrong):
    """Moves the rejected state to the target's mean without reflecting its noise."""

    def correct(self, step: GaussianSteps, noise: Noise) -> Tensor:
        return step.p.mean + step.std * step.noise


class DrawsFromTheTarget(Wrong):
    """Samples the rejected state from the target instead of the residual."""

    def correct(self, step: GaussianSteps, noise: Noise) -> Tensor:
        return step.p.mean + step.std * fresh(step, noise)


class Rounded(Wrong):
    """Recovers the noise from states that were rounded to bfloat16."""

    def recover(self, step: GaussianSteps, draft: Draft) -> GaussianSteps:
        rounded = draft.tokens.bfloat16().float()
        return replace(step, noise=(rounded - step.q.mean) / step.std)


class NoSquare(Wrong):
    """Omits r^2 / 2: the test of a draft centred between the two."""

    def chance(self, step: GaussianSteps) -> Tensor:
        return (-dot(step.noise, step.mean_shift, step.p.events)).clamp_max(0).exp()


class NeverAccepts(Wrong):
    """Always samples again: the right distribution, but no acceptance."""

    def chance(self, step: GaussianSteps) -> Tensor:
        return torch.zeros_like(acceptance(step))

    def correct(self, step: GaussianSteps, noise: Noise) -> Tensor:
        return step.p.mean + step.std * fresh(step, noise)


class FreshAcross(Wrong):
    """Samples the orthogonal part of a rejected state again: right distribution, uncoupled."""

    def correct(self, step: GaussianSteps, noise: Noise) -> Tensor:
        new, unit = fresh(step, noise), step.mean_shift / step.mean_shift.norm(dim=-1, keepdim=True)
        kept = dot(new - step.noise, unit, 1)
        return mirror(replace(step, noise=new - expand_event(kept, unit) * unit))


def fresh(step: GaussianSteps, noise: Noise) -> Tensor:
    keys = noise.fresh_keys(Lane.OTHER, torch.zeros(1, dtype=torch.int64))
    return keys.normal(step.noise.shape[-1])[:, 0]


@pytest.mark.parametrize(
    "wrong", [AroundTheDraft, KeepsTheNoise, DrawsFromTheTarget, NoSquare], ids=lambda w: w.__name__
)
def test_wrong_distributions_are_found(wrong: type[Wrong]) -> None:
    case = apart(1.0, 6)
    with pytest.raises(AssertionError, match="along"):
        check_distribution(play(wrong(), case, N[6]), case)


def test_noise_recovered_from_rounded_states_is_found() -> None:
    case = apart(2.0, 1, at=8.0, std=0.05)
    check_distribution(play(Reflection(), case, N[1]), case)
    with pytest.raises(AssertionError, match="along"):
        check_distribution(play(Rounded(), case, N[1]), case)


def test_the_right_distribution_alone_does_not_make_a_reflection() -> None:
    case = apart(1.0, 6)
    played = play(NeverAccepts(), case, N[6])
    check_distribution(played, case)
    with pytest.raises(AssertionError, match="acceptance"):
        check_acceptance(played, overlap(1.0))
    played = play(FreshAcross(), case, N[6])
    check_distribution(played, case)
    check_acceptance(played, overlap(1.0))
    with pytest.raises(AssertionError, match="across the line"):
        check_coupling(played, case)


def test_states_of_any_shape_and_a_deviation_per_entry() -> None:
    noise, std = KeyedNoise(torch.arange(4_000)), torch.rand(2, 3) + 0.5
    driving = noise.shared_keys(torch.ones(4_000, 1, dtype=torch.int64)).normal(2, 3)
    q = Gaussian(torch.full((4_000, 1, 2, 3), 0.3), std, 2)
    draft = Draft.from_tree(
        Tree.chain(1), q.mean + std * driving, Kind.RACE, q, extras=DrivingNoise(driving)
    )
    scores = Scores(Gaussian(torch.zeros(4_000, 2, 2, 3), std, 2), torch.tensor([[1, 2]] * 4_000))
    verdict = Reflection().verify(draft, scores, noise)
    r = float((0.3 / std).norm())
    share = float(verdict.length.double().mean())
    assert abs(share - overlap(r)) < 4.5 * math.sqrt(overlap(r) / 4_000)
    assert verdict.next is not None
    state = torch.where(verdict.length.view(-1, 1, 1) > 0, draft.tokens[:, 0], verdict.next) / std
    gram = state.flatten(1).T @ state.flatten(1) / 4_000
    assert_close(gram, torch.eye(6), atol=0.1, rtol=0)  # 4.5 standard errors


def test_after_full_acceptance_and_without_a_draft_comes_the_plain_state() -> None:
    noise = KeyedNoise(torch.arange(7))
    draft, scores = make_draft(replace(apart(0.0, 3), tree=Tree.chain(3)), noise, 7)
    verdict = Reflection().verify(draft, scores, noise)
    plain = scores.distribution.sample(noise.shared_keys(scores.position))
    assert verdict.length.tolist() == [3] * 7
    assert verdict.path.tolist() == [[0, 1, 2]] * 7
    assert_close(verdict.next, plain[:, 3], rtol=0, atol=0)
    empty = Draft.empty(7, torch.device("cpu"), torch.float32, (3,))
    verdict = Reflection().verify(
        empty, replace(scores, distribution=scores.distribution[:, :1]), noise
    )
    assert verdict.path.shape == (7, 0)
    assert_close(verdict.next, plain[:, 0], rtol=0, atol=0)


def test_padded_states_are_not_looked_at() -> None:
    noise = KeyedNoise(torch.arange(500))
    draft, scores = make_draft(replace(apart(0.0, 2), tree=Tree.chain(3)), noise, 500)
    mask = torch.arange(3) < (torch.arange(500) % 4)[:, None]
    spoiled = torch.where(mask[..., None], draft.tokens, torch.nan)
    draft = replace(draft, tokens=spoiled, mask=mask, padded=True)
    verdict = Reflection().verify(draft, scores, noise)
    assert verdict.length.tolist() == mask.sum(-1).tolist()
    assert verdict.next is not None
    assert bool(verdict.next.isfinite().all())


def test_what_cannot_be_reflected_is_refused() -> None:
    noise = KeyedNoise(torch.arange(5))
    draft, scores = make_draft(apart(1.0, 2), noise, 5)
    with pytest.raises(ValueError, match=r"set Draft\.extras"):
        Reflection().verify(replace(draft, extras=None), scores, noise)
    other, scores_of_other = make_draft(replace(apart(1.0, 2), draft_std=0.5), noise, 5)
    assert Reflection().verify(other, scores_of_other, noise).next is not None
    for case in (replace(apart(1.0, 2), draft_std=0.0), replace(apart(1.0, 2), std=0.0)):
        still, scores_of_still = make_draft(case, noise, 5)
        with pytest.raises(ValueError, match="standard deviation 0"):
            Reflection().verify(still, scores_of_still, noise)
    tree, scores_of_tree = make_draft(apart(1.0, 2, width=2), noise, 5)
    with pytest.raises(ValueError, match="verifies chains only"):
        Reflection().verify(tree, scores_of_tree, noise)
    with pytest.raises(ValueError, match="DET"):
        Reflection().verify(replace(draft, kind=Kind.DET), scores, noise)


@pytest.mark.parametrize("draft_std", [0.5, 0.9])
@pytest.mark.parametrize("d", [1, 6])
def test_steps_of_other_deviations_keep_the_target_distribution(d: int, draft_std: float) -> None:
    case = replace(apart(1.0, d), draft_std=draft_std)
    check_distribution(play(Reflection(), case, 20_000), case)
    check_joint(play(Reflection(), replace(BENT, draft_std=draft_std, ragged=True), 60_000))


def test_both_kinds_of_steps_in_one_chain_are_exact_jointly() -> None:
    """Rows with an odd index draft with another deviation in their second step."""
    generator = torch.Generator().manual_seed(0)
    n = 60_000
    noise = KeyedNoise(torch.randint(-(2**62), 2**62, (n,), generator=generator))
    draft, scores = make_draft(BENT, noise, n)
    assert isinstance(draft.distribution, Gaussian)
    assert isinstance(draft.extras, DrivingNoise)
    std = torch.full_like(draft.distribution.mean, BENT.std)
    std[1::2, 1] = 1.1
    first = draft.tokens[:, 0]
    second = draft.distribution.mean[:, 1] + std[:, 1] * draft.extras.noise[:, 1]
    tokens = torch.stack([first, second], 1)
    draft = replace(draft, tokens=tokens, distribution=Gaussian(draft.distribution.mean, std, 1))
    means = BENT.p(torch.cat([0 * tokens[:, :1], tokens], 1))
    deviations = scores.distribution.std  # type: ignore[attr-defined]
    scores = replace(scores, distribution=Gaussian(means, deviations, 1))
    verdict = Reflection().verify(draft, scores, noise)
    following = verdict.next
    assert following is not None
    last = torch.where((verdict.length == 0)[:, None], following, first)
    after = torch.where((verdict.length == 1)[:, None], following, second)
    fresh = BENT.p(last) + BENT.std * torch.randn(n, 1, generator=generator)
    after = torch.where((verdict.length == 0)[:, None], fresh, after)
    gaps = [last - BENT.p(torch.zeros(n, 1)), after - BENT.p(last)]
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        increments = torch.stack([gap[rows] / BENT.std for gap in gaps], 1)
        check_joint(RoundOutcome(increments, verdict.length, tokens, following))
        assert 0.2 < (verdict.length[rows] == 2).double().mean() < 0.9
