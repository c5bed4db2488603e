"""`certify` of recipes that decode latents: exact ones pass, wrong claims are refuted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import mmspec
from mmspec import recipes
from mmspec.bench import certify
from mmspec.bench.certificate import ALPHA, Trial
from mmspec.bench.gaussian_tests import kolmogorov, kolmogorov_p_value, moments
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.modalities.diffusion.certificates import _check_pipeline
from mmspec.modalities.diffusion.sample_tests import (
    cell_p_value,
    increment_p_value,
    projection_p_value,
)
from mmspec.modalities.diffusion.tiny_models import plain_recipe, sample, sample_reference, settings
from mmspec.recipe import Deferred
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.covering import limited
from tests.toys.pipelines import build_request, pipeline


@dataclass(frozen=True)
class Careless(Verifier):
    """Claims to be lossless, and keeps whatever is within a wide tolerance."""

    tolerance: float = 1.0
    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = ToleranceWindow.kinds

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        return ToleranceWindow(self.tolerance).verify(draft, scores, noise)


@pytest.mark.parametrize("name", limited(["asd", "accelerated-diffusion"], 1))
def test_exact_recipes_are_certified(name: str) -> None:
    found = certify(name, samples=600, seeds=3)
    assert found.verdict == "exact"
    assert {check.outcome for check in found.checks} == {"passed"}
    twin = "seeded equality, target as its own drafter"
    assert (twin in {check.name for check in found.checks}) == (name == "accelerated-diffusion")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", recipes.names("latents"))
def test_every_recipe_is_what_it_claims(name: str) -> None:
    found = certify(name, samples=1000, seeds=3)
    assert found.verdict == ("exact" if recipes.get(name).exact else "lossy")


@dataclass(frozen=True)
class Drifting(Verifier):
    """Claims to be lossless, and makes every state of its own a little wider in a batch."""

    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = False
    kinds: ClassVar[tuple[Kind, ...]] = ToleranceWindow.kinds

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        found = ToleranceWindow(0.0).verify(draft, scores, noise)
        if found.next is None or draft.batch == 1:
            return found
        return replace(found, next=1.05 * found.next)


LATE = Deferred(lambda kit: Careless(), "careless")


@pytest.mark.parametrize(
    "verifier",
    [
        pytest.param(Careless(), id="own", marks=pytest.mark.exhaustive),
        pytest.param(LATE, id="late"),
    ],
)
def test_a_wrong_claim_is_refuted(verifier: Any) -> None:
    wrong = replace(recipes.get("accelerated-diffusion-frozen"), verifier=verifier)
    found = certify(wrong, samples=200, seeds=3)
    outcomes = {check.name: check.outcome for check in found.checks}
    assert (found.verdict, found.modality) == ("refuted", "diffusion")
    assert outcomes["frequencies, ancestral"] == "refuted"
    assert outcomes["seeded equality, window of one"] == "passed"


@pytest.mark.exhaustive
def test_samples_are_not_held_against_the_recipe_s_own() -> None:
    """What is wrong without a draft, too, shows in every seed and sample, and is measured."""
    wrong = replace(recipes.get("accelerated-diffusion"), verifier=Drifting())
    found = certify(wrong, samples=200, seeds=3)
    assert len(found.checks) == 5
    assert {check.outcome for check in found.checks} == {"refuted"}
    assert found.distance is not None
    assert found.distance > 0.2  # two samples of one distribution are 0.04 apart on a line


def test_a_lossy_recipe_is_called_lossy_and_measured() -> None:
    lossy = replace(recipes.get("paradigms"), verifier=ToleranceWindow(1.0))
    found = certify(lossy, samples=200, seeds=3)
    assert found.verdict == "lossy"
    assert found.distance is not None
    assert "lossy" in {check.outcome for check in found.checks}


def test_forecasts_are_measured_on_pictures() -> None:
    found = certify("taylorseer", seeds=1)
    assert (found.verdict, found.distance_of) == (
        "lossy",
        "relative distance of images with the same seed",
    )
    assert found.distance is not None
    assert found.distance > 0.01
    neutral = recipes.get("taylorseer")
    same = certify(replace(neutral, options={**neutral.options, "interval": 1}), seeds=1)
    assert same.distance == 0
    assert [check.outcome for check in same.checks] == ["passed"]


def test_the_window_of_one_is_plain_whatever_the_recipe() -> None:
    place = settings()[0]
    one, other = (
        sample(plain_recipe(recipes.get(name)), place, range(3)) for name in ("asd", "paradigms")
    )
    assert torch.equal(one.states, other.states)
    assert one.calls == other.calls == place.kernel.num_steps
    assert torch.equal(one.states, sample_reference(place, range(3)).states)


def test_every_test_of_samples_can_fail() -> None:
    """Moved by a tenth of a deviation, made wider, or mixed with other weights."""
    data = settings()[0].data
    left, right = data.sample(4000, 1), data.sample(4000, 2)
    for test in (cell_p_value, projection_p_value):
        assert test(data, left, right) > ALPHA
        assert test(data, left, right + 0.1) < ALPHA
    assert moments(left, right) > ALPHA
    assert moments(left, 1.15 * right) < ALPHA
    heavy = replace(data, weights=data.weights.flip(0)).sample(4000, 3)
    assert cell_p_value(data, left, heavy) < ALPHA
    assert projection_p_value(data, left, heavy) < ALPHA


def test_increments_see_noise_that_is_wrong_in_one_step() -> None:
    """Each state a little further out, in one step of 24."""
    place = settings()[0]
    chains = sample(recipes.get("asd"), place, range(300))
    assert increment_p_value(place, chains.states) > ALPHA
    spread = chains.states.clone()
    spread[:, 10] += place.kernel.std[9].float() * spread[:, 10].sign()
    assert increment_p_value(place, spread) < ALPHA


def test_kolmogorov_by_hand() -> None:
    gap, p = kolmogorov(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.5, 3.5, 4.5]))
    assert gap == pytest.approx(2 / 3)
    assert p == kolmogorov_p_value(gap / (2 / 3) ** 0.5)
    assert kolmogorov_p_value(1.3581) == pytest.approx(0.05, abs=1e-4)  # the table's 5 %
    assert kolmogorov_p_value(0.1) == 1


def test_a_pipeline_of_one_s_own_is_not_held_against_the_recipe_s_own_pictures() -> None:
    """Without a draft, too, what is wrong draws other pictures than plain sampling does."""
    right = recipes.get("accelerated-diffusion-carried")
    fast = mmspec.accelerate(pipeline("ddpm"), right)
    trial = Trial(
        fast, [{**build_request("ddpm"), "batch_size": 2, "num_inference_steps": 4}], seeds=1
    )
    outcomes = [
        _check_pipeline(recipe, trial).outcome
        for recipe in (right, replace(right, verifier=Drifting()))
    ]
    assert outcomes == ["passed", "refuted"]
