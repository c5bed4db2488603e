"""Block verification of Gaussian chains: jointly exact, and never shorter than step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mmspec.distributions.gaussian import DrivingNoise
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Kind, Verifier
from mmspec.trees import Tree
from mmspec.verifiers import gaussian_block
from mmspec.verifiers.gaussian_block import GaussianBlock
from mmspec.verifiers.gaussian_steps import GaussianSteps, line_excess, residual
from mmspec.verifiers.reflection import Reflection
from tests.covering import covering
from tests.verifiers.gaussian_rounds import (
    BENT,
    Case,
    apart,
    check_acceptance,
    check_coupling,
    check_distribution,
    check_joint,
    check_normal,
    make_draft,
    overlap,
    play,
)

FRESH = replace(BENT, kind=Kind.IID)
TURNED = Case(  # how far the second step is off depends on what is across the line of the first
    p=lambda x: 0.9 * x,
    q=lambda x: 0.9 * x + torch.stack([0.6 + 1.5 * (x[..., 1] > 0), 0 * x[..., 1]], -1),
    tree=Tree.chain(2),
    d=2,
    kind=Kind.IID,
)


def constant(r: float, depth: int) -> Case:
    return replace(apart(r, 1), tree=Tree.chain(depth), kind=Kind.IID)


@pytest.mark.parametrize(
    ("case", "ragged"),
    covering([FRESH, replace(FRESH, d=2), TURNED, constant(1.5, 2)], [False, True], strength=1),
)
def test_chains_of_two_are_exact_jointly(case: Case, ragged: bool) -> None:
    check_joint(play(GaussianBlock(), replace(case, ragged=ragged), 60_000))


def test_chains_of_four_are_exact_jointly() -> None:
    check_joint(play(GaussianBlock(), replace(FRESH, tree=Tree.chain(4)), 60_000), cells=4)


@pytest.mark.parametrize("r", [0.3, 1.0, 3.0])
def test_one_state_is_accepted_as_by_reflection(r: float) -> None:
    case = replace(apart(r, 6), kind=Kind.IID)
    played = play(GaussianBlock(), case, 20_000)
    check_distribution(played, case)
    check_acceptance(played, overlap(r))


def expected_length(r: float) -> float:
    """Of a chain of two: E w_1 + E w_2, because run i is reached with probability w_i."""
    s = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    weight = (-(s**2) / 2).exp() / math.sqrt(2 * math.pi) * (s[1] - s[0])
    w = (r * s - r**2 / 2).clamp_max(0).exp()
    return float((weight * (w + w - line_excess(torch.tensor(r).double(), w))).sum())


@pytest.mark.parametrize("r", [0.5, 1.0, 2.0])
def test_the_accepted_length_is_the_block_s_own(r: float) -> None:
    length = play(GaussianBlock(), constant(r, 2), 60_000).length.double()
    error = float(length.std()) / math.sqrt(len(length))
    assert abs(float(length.mean()) - expected_length(r)) < 4.5 * error
    assert expected_length(r) > overlap(r) + overlap(r) ** 2 + 4.5 * error


@pytest.mark.parametrize("case", [FRESH, replace(FRESH, d=2), TURNED, constant(0.7, 5)])
def test_never_shorter_than_step_by_step(case: Case) -> None:
    block, single = (play(v, case, 30_000).length.double() for v in (GaussianBlock(), Reflection()))
    error = float((block - single).std()) / math.sqrt(len(block))
    assert float((block - single).mean()) > -4.5 * error
    if case.tree.depth == 5:  # where it pays
        assert float((block - single).mean()) > 4.5 * error


def without_weight(step: GaussianSteps, w: Tensor, uniform: Tensor) -> Tensor:
    """Wrong: the residual of one step, (p - q)+."""
    return residual(step, torch.ones_like(w), uniform)


def first_failure(hits: Tensor, index: Tensor) -> Tensor:
    """Wrong: stops at the first run that does not pass."""
    return hits.cumprod(-1).sum(-1)


@pytest.mark.parametrize(
    ("part", "wrong"), [("residual", without_weight), ("longest_run", first_failure)]
)
def test_wrong_blocks_are_found(
    monkeypatch: pytest.MonkeyPatch, part: str, wrong: Callable[..., Tensor]
) -> None:
    check_joint(play(GaussianBlock(), TURNED, 60_000))
    monkeypatch.setattr(gaussian_block, part, wrong)
    with pytest.raises(AssertionError, match="joint"):
        check_joint(play(GaussianBlock(), TURNED, 60_000))


def test_what_is_across_the_line_is_kept_and_right_to_keep() -> None:
    played = play(GaussianBlock(), TURNED, 60_000)
    check_joint(replace(played, increments=played.increments.flip(-1)))
    check_normal(played.increments[played.length == 0, 0, 1], "across, where refused")
    check_coupling(played, TURNED)


def test_noise_that_is_used_again_is_refused() -> None:
    noise = KeyedNoise(torch.arange(10))
    draft, scores = make_draft(replace(BENT, kind=Kind.RACE), noise, 10)
    with pytest.raises(ValueError, match="looks ahead"):
        GaussianBlock().verify(replace(draft, kind=Kind.IID), scores, noise)
    with pytest.raises(ValueError, match="RACE"):
        GaussianBlock().verify(draft, scores, noise)


@pytest.mark.parametrize("verifier", [Reflection(), GaussianBlock()])
def test_only_looking_ahead_spoils_the_noise_behind_a_refused_state(verifier: Verifier) -> None:
    """With the first state refused, what drove the second is as good as new, or it is not."""
    case, noise = constant(1.5, 2), KeyedNoise(torch.arange(50_000))
    draft, scores = make_draft(case, noise, 50_000)
    assert isinstance(draft.extras, DrivingNoise)
    behind = draft.extras.noise[verifier.verify(draft, scores, noise).length == 0, 1, 0]
    if isinstance(verifier, Reflection):
        check_normal(behind, "noise behind")
        return
    with pytest.raises(AssertionError, match="noise behind"):
        check_normal(behind, "noise behind")
