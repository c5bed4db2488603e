"""Sequence coupling: the published acceptance, the target's distribution, whole trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from mmspec.distributions.gaussian import DrivingNoise, Gaussian
from mmspec.distributions.noise import KeyedNoise, Keys, Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.trees import Tree
from mmspec.verifiers import sequence
from mmspec.verifiers.gaussian_steps import GaussianSteps, line_excess, residual
from mmspec.verifiers.reflection import Reflection
from mmspec.verifiers.sequence import Sequence, StateSiblings, sibling_acceptance
from tests.covering import covering
from tests.verifiers.gaussian_rounds import (
    BENT,
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

TABLE = {  # methods: acceptance of 1, 2, 3 and 4 siblings
    1.0: (0.617, 0.714, 0.765, 0.798),
    2.0: (0.317, 0.404, 0.458, 0.497),
    3.0: (0.134, 0.180, 0.211, 0.235),
}


def acceptance_rate(r: float, siblings: int) -> float:
    """1 - G after that many, from the rule's own recursion."""
    real = torch.ones(1, 1, siblings, dtype=torch.bool)
    place = torch.zeros(1, 1, siblings, dtype=torch.float64)
    far = torch.full((1, 1), r, dtype=torch.float64)
    _, taken = sibling_acceptance(StateSiblings(place.long(), real, place, far))
    return 1 - float(line_excess(far, 1 / taken) * taken)


@pytest.mark.parametrize("r", TABLE)
def test_acceptance_is_the_published_one(r: float) -> None:
    found = [round(acceptance_rate(r, siblings), 3) for siblings in (1, 2, 3, 4)]
    assert found == list(TABLE[r])
    assert acceptance_rate(r, 1) == pytest.approx(overlap(r), abs=1e-12)


@dataclass(frozen=True)
class Given:
    """Random numbers: one per sibling, and one for the residual."""

    accept: Tensor  # (C,)
    correct: float

    def flip(self, probability: Tensor, lane: int) -> Tensor:
        return self.accept.expand_as(probability) < probability

    def fresh_keys(self, lane: int, index: Tensor) -> Any:
        return SimpleNamespace(uniform=lambda: torch.tensor([[self.correct]]).double())

    def shared_keys(self, position: Tensor) -> Keys:
        return KeyedNoise(torch.zeros(1, dtype=torch.int64)).shared_keys(position)


@pytest.mark.parametrize(
    ("accept", "path", "along"),
    [
        ((0.2230, 0.0, 0.0), [0], None),  # exp(-1.5) = 0.2231
        ((0.2232, 0.0, 0.3802), [2], None),  # the second is below lambda = 1 and is never accepted
        ((0.2232, 0.0, 0.3803), [], 2.476836),  # a quarter of (p - 1.66932 q)+ is above it
    ],
)
def test_three_siblings_by_hand(
    accept: tuple[float, ...], path: list[int], along: float | None
) -> None:
    """r = 1, S = -1, 0.2 and 0.9: lambda 1, 1.382925, 1.669320 and G 0.382925, 0.286395, 0.235184.

    The means differ along the first axis, so a residual keeps the second of the first sibling.
    """
    driving = torch.tensor([[[-1.0, 0.4], [0.2, 2.0], [0.9, 3.0]]], dtype=torch.float64)
    std, mean = torch.tensor(0.5, dtype=torch.float64), torch.tensor([3.0, 5.0]).double()
    tree, shift = Tree.branching([3]), torch.tensor([0.5, 0.0]).double()
    q = Gaussian(mean.expand(1, 3, 2), std, 1)
    tokens, extras = mean + std * driving, DrivingNoise(driving)
    draft = Draft.from_tree(tree, tokens, Kind.IID, q, None, extras)
    p = Gaussian((mean + shift).expand(1, 4, 2), std, 1)
    scores = Scores(p, torch.tensor([[1, 2, 2, 2]]))
    verdict = Sequence().verify(draft, scores, cast(Noise, Given(torch.tensor(accept), 0.25)))
    assert [node for node in verdict.path[0].tolist() if node >= 0] == path
    assert verdict.next is not None
    if along is not None:
        expected = mean + std * torch.tensor([along, 0.4]).double()
        assert torch.allclose(verdict.next[0], expected, atol=1e-6)


@pytest.mark.parametrize(("r", "siblings"), [(1.0, 4), (2.0, 1), (2.0, 3), (3.0, 2)])
def test_siblings_have_the_target_distribution_and_that_acceptance(r: float, siblings: int) -> None:
    case = apart(r, 3, width=siblings)
    played = play(Sequence(), case, 20_000)
    check_distribution(played, case)
    check_acceptance(played, acceptance_rate(r, siblings))
    check_untouched(played, case)
    check_coupling(played, case)


def test_one_sibling_decides_as_reflection_does() -> None:
    case = replace(apart(1.3, 2), kind=Kind.RACE)
    assert play(Sequence(), case, 5_000).length.equal(play(Reflection(), case, 5_000).length)


TREES = [Tree.branching([2, 2]), Tree((-1, -1, -1, 0, 1, 1)), Tree.chain(2)]


@pytest.mark.parametrize(("d", "tree"), covering([1, 2], TREES, strength=1), ids=str)
def test_trees_are_exact_jointly(tree: Tree, d: int) -> None:
    check_joint(play(Sequence(), replace(BENT, tree=tree, d=d, kind=Kind.IID), 40_000))


def test_equal_distributions_take_the_first_branch_to_its_end() -> None:
    noise = KeyedNoise(torch.arange(100))
    case = replace(apart(0.0, 2), tree=Tree.branching([2, 2, 1]), kind=Kind.IID)
    draft, scores = make_draft(case, noise, 100)
    verdict = Sequence().verify(draft, scores, noise)
    assert verdict.path.tolist() == [[0, 2, 6]] * 100
    assert verdict.next is not None
    plain = scores.distribution.sample(noise.shared_keys(scores.position))
    assert verdict.next.equal(plain[:, 7])


def test_padded_siblings_are_not_tried() -> None:
    noise = KeyedNoise(torch.arange(1_000))
    draft, scores = make_draft(replace(apart(1.0, 2, width=3)), noise, 1_000)
    one = draft.mask & (torch.arange(3) == 0)
    none = replace(draft, mask=draft.mask & False, padded=True)
    verdict = Sequence().verify(replace(draft, mask=one, padded=True), scores, noise)
    assert not bool((verdict.path > 0).any())
    verdict = Sequence().verify(none, scores, noise)
    assert not bool(verdict.length.any())
    assert verdict.next is not None
    assert verdict.next.equal(scores.distribution.sample(noise.shared_keys(scores.position))[:, 0])


@dataclass(frozen=True)
class SharedBySiblings(Verifier):
    """A correct verifier whose siblings share one noise."""

    lossless: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = Sequence.kinds

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        assert isinstance(draft.extras, DrivingNoise)
        driving = draft.extras.noise
        first = DrivingNoise(driving[:, :1].expand_as(driving))
        tokens = draft.tokens[:, :1].expand_as(draft.tokens)
        changed = replace(draft, tokens=tokens, extras=first)
        return Sequence().verify(changed, scores, noise)


def around_the_draft(step: GaussianSteps, w: Tensor, uniform: Tensor) -> Tensor:
    """Wrong: the coordinate relative to the draft's mean is added to the target's."""
    return residual(step, w, uniform) + step.p.mean - step.q.mean


def of_one_sibling(step: GaussianSteps, w: Tensor, uniform: Tensor) -> Tensor:
    """Wrong: the residual of a single proposal, regardless of the tested siblings."""
    return residual(step, torch.ones_like(w), uniform)


def nothing_across(step: GaussianSteps, w: Tensor, uniform: Tensor) -> Tensor:
    """Wrong: omits the orthogonal part."""
    unit = step.mean_shift / step.mean_shift.norm(dim=-1, keepdim=True)
    along = (step.noise * unit).sum(-1, keepdim=True) * unit
    return residual(replace(step, noise=along), w, uniform)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [(around_the_draft, "along"), (of_one_sibling, "along"), (nothing_across, "across")],
)
def test_wrong_residuals_are_found(
    monkeypatch: pytest.MonkeyPatch, wrong: object, where: str
) -> None:
    case = apart(2.0, 3, width=3)
    monkeypatch.setattr(sequence, "residual", wrong)
    with pytest.raises(AssertionError, match=where):
        check_distribution(play(Sequence(), case, 20_000), case)


def test_siblings_with_the_same_noise_are_found() -> None:
    case = apart(2.0, 3, width=3)
    with pytest.raises(AssertionError, match="along"):
        check_distribution(play(SharedBySiblings(), case, 20_000), case)
