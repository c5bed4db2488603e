"""Certificates of recipes for continuous tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.bench import certify
from mmspec.bench.certificate import Trial
from mmspec.bench.gaussian_tests import uniform_gap, uniform_p_value
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.modalities.mar.measures import _check_self_drafting
from mmspec.recipe import Deferred
from mmspec.verifiers.path_ratio import PathRatio
from tests.toys.mar import mar


@dataclass(frozen=True)
class Credulous(Verifier):
    """Wrong: keeps whatever was drafted, and claims to be lossless."""

    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        found = PathRatio().verify(draft, scores, noise)
        return replace(found, length=draft.mask.sum(-1)) if draft.nodes else found


@dataclass(frozen=True)
class Widening(Verifier):
    """Wrong: refuses everything, stretches what it says instead, and claims to be lossless."""

    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        none = replace(draft, mask=draft.mask & False, padded=True)
        found = PathRatio().verify(none, scores, noise)
        return replace(found, next=None if found.next is None else 1.5 * found.next)


def test_the_plain_picture_is_not_the_recipe_s_own() -> None:
    wrong = replace(recipes.get("cspd-coupled"), verifier=Widening())
    outcomes = {check.name: check.outcome for check in certify(wrong, seeds=5, samples=100).checks}
    assert outcomes["draft = target"] == "refuted"


def test_a_model_of_one_s_own_is_held_against_its_plain_sampling() -> None:
    right = recipes.get("cspd-coupled")
    outcomes = []
    for recipe in (right, replace(right, verifier=Widening())):
        fast = mmspec.accelerate(mar(), recipe, drafter=mar(1))
        request = {"class_labels": [1, 2], "steps": 3, "head_steps": 3, "last_noise": True}
        outcomes.append(_check_self_drafting(Trial(fast, [request], seeds=2)).outcome)
    assert outcomes == ["passed", "refuted"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("cspd-coupled", "exact"),
        pytest.param("cspd", "lossy", marks=pytest.mark.exhaustive),
        pytest.param("credulous", "refuted", marks=pytest.mark.exhaustive),  # as the deferred one
        ("late", "refuted"),
    ],
)
def test_certificates(name: str, wanted: str) -> None:
    liars: dict[str, Any] = {
        "credulous": Credulous(),
        "late": Deferred(lambda kit: Credulous(), "credulous"),
    }
    plan = recipes.get("cspd-coupled" if name in liars else name)
    plan = replace(plan, verifier=liars.get(name, plan.verifier))
    found = certify(plan, seeds=5, samples=1000)
    assert (found.verdict, found.modality) == (wanted, "mar")
    assert len(found.checks) == 4
    outcomes = {check.name: check.outcome for check in found.checks}
    if wanted == "exact":
        assert set(outcomes.values()) == {"passed"}
    else:
        assert outcomes["frequencies, both"] == wanted
    assert found.distance is not None


def test_gaps_by_hand() -> None:
    assert uniform_gap(torch.tensor([0.5])) == 0.5
    assert uniform_gap(torch.tensor([0.25, 0.75])) == 0.25
    assert uniform_p_value(torch.linspace(0.001, 0.999, 500)) == 1.0
    assert uniform_p_value(torch.linspace(0.001, 0.5, 500)) < 1e-9
