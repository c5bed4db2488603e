"""`certify` proves what is exact and refutes what only claims to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mmspec import recipes
from mmspec.bench import certify
from mmspec.bench.enumeration import TOLERANCE, enumerate_verifier
from mmspec.bench.frequency import chi_square, p_value
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import KeyedNoise, Noise
from mmspec.draft import Draft, Drafter, Kind, Scores, Verdict, Verifier
from mmspec.modalities.common.tiny_models import joint_distribution, request, tiny_llama
from mmspec.modalities.vlm import tiny_models as toys
from mmspec.recipe import Deferred, Recipe
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.recursive import Recursive
from tests.covering import exhaustive


@dataclass(frozen=True)
class Hasty:
    """Claims to be lossless and is not: it corrects from p where it should from the residual."""

    lossless: ClassVar[bool] = True

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        return (p.prob(x) / q.prob(x)).clamp_max(1)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


WRONG = replace(recipes.get("speculative-sampling"), verifier=Recursive(Hasty()))
DEFERRED = Deferred(lambda kit: Recursive(Hasty()), "recursive, hasty")


@pytest.mark.parametrize(
    "name",
    [
        "coupled",
        "speculative-sampling",
        pytest.param("prompt-lookup", marks=pytest.mark.exhaustive),
    ],
)
def test_exact_recipes_are_certified(name: str) -> None:
    found = certify(name, samples=500, seeds=3)
    assert (found.recipe, found.modality) == (name, "vlm")
    assert found.verdict == "exact"
    assert not [check for check in found.checks if check.outcome in ("refuted", "lossy")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [WRONG, replace(WRONG, verifier=DEFERRED)], ids=["own", "late"])
def test_a_wrong_claim_is_refuted(wrong: Recipe) -> None:
    """Also by a verifier that is made when its recipe is bound, and claims only then."""
    found = certify(wrong, samples=500, seeds=1)
    assert (found.verdict, found.claims_exact) == ("refuted", True)
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes["enumeration"] == outcomes["frequencies"] == "refuted"
    assert outcomes["greedy equality"] == "passed"


@pytest.mark.exhaustive
def test_a_given_model_is_tested_for_equality() -> None:
    """Its answers are `generate()`'s where the recipe is right, and only there."""
    asked = {**request(1), "max_new_tokens": 12}
    for name, wanted in (("coupled", "passed"), ("typical", "skipped")):
        fast = toys.bind_recipe(recipes.get(name), 3)
        found = certify(name, fast, [asked], samples=1, seeds=2)
        outcomes = {check.name: check.outcome for check in found.checks}
        assert outcomes["greedy equality"] == "passed"
        assert outcomes["seeded equality"] == wanted
    with pytest.raises(ValueError, match="give both or none"):
        certify("coupled", toys.bind_recipe(recipes.get("coupled"), 0))


def test_plain_decoding_is_not_held_against_itself() -> None:
    outcomes = {check.name: check for check in certify("plain", samples=500, seeds=2).checks}
    assert outcomes["seeded equality"].outcome == "skipped"
    assert "plain decoding itself" in outcomes["seeded equality"].detail
    assert outcomes["greedy equality"].outcome == "passed"  # against generate()


@pytest.mark.exhaustive
def test_seeds_tell_a_drifting_loop() -> None:
    """A coupled verifier with another seed samples the distribution, but other tokens."""

    @dataclass(frozen=True)
    class Drifting(Coupled):
        def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
            other = KeyedNoise.from_seed(12345, draft.batch, draft.tokens.device)
            return super().verify(draft, scores, other)

    wrong = replace(recipes.get("coupled"), verifier=Drifting())
    found = certify(wrong, samples=500, seeds=2)
    outcomes = {check.name: check.outcome for check in found.checks}
    assert (found.verdict, outcomes["seeded equality"]) == ("refuted", "refuted")


@dataclass(frozen=True)
class Shifted(Coupled):
    """Claims to be lossless, and always says the id after the right one."""

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        found, distribution = (
            super().verify(draft, scores, noise),
            as_categorical(scores.distribution),
        )
        assert found.next is not None
        return replace(found, next=(found.next + 1) % distribution.size)


@pytest.mark.parametrize("modality", exhaustive(("vlm", "image"), ("vlm",)))
def test_answers_are_not_held_against_the_recipe_s_own(modality: str) -> None:
    """What is wrong in every token fails every check that is made."""
    wrong = replace(recipes.get("coupled"), verifier=Shifted())
    found = certify(wrong, modality=modality, samples=100, seeds=1)
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes.pop("enumeration") == "skipped"
    assert set(outcomes) == {"frequencies", "greedy equality", "seeded equality"}
    assert set(outcomes.values()) == {"refuted"}
    plain = replace(recipes.get("plain"), verifier=Shifted())  # also where nothing is drafted
    checks = {check.name: check for check in certify(plain, modality=modality, samples=1).checks}
    assert checks["greedy equality"].outcome == "refuted"


@pytest.mark.parametrize("modality", ["vlm", "vla"])
def test_a_drafter_that_fails_proves_nothing(modality: str) -> None:
    """Plain decoding finishes its answers, which are right whatever the recipe is."""

    class Failing(Drafter):
        kinds = (Kind.DET,)

        def propose(self, context: Any, state: Any) -> Draft:
            raise IndexError("tuple index out of range")

    name = "prompt-lookup" if modality == "vlm" else "hold-last"
    broken = replace(recipes.get(name), architecture=lambda kit: Failing())
    found = certify(broken, modality=modality, samples=500, seeds=1)
    assert found.verdict == "untested"
    details = [check.detail for check in found.checks if check.name != "enumeration"]
    assert len(details) == 3
    assert all("the drafter failed: Failing: IndexError: tuple" in one for one in details)


def test_what_cannot_be_tested_is_said() -> None:
    with pytest.raises(ValueError, match="vlm: it needs a codebook"):
        certify("lantern", modality="vlm")
    untested = certify("massv", samples=500)
    assert untested.verdict == "untested"
    assert {check.outcome for check in untested.checks} == {"skipped"}


@pytest.mark.exhaustive
def test_a_lossy_recipe_is_called_lossy_and_measured() -> None:
    lossy = replace(recipes.get("speculative-sampling"), verifier=Recursive(Lenience(0.5)))
    found = certify(lossy, samples=500, seeds=1)
    assert found.verdict == "lossy"
    assert found.distance is not None
    assert found.distance > 0.02


def test_enumeration_of_nothing_is_no_proof() -> None:
    with pytest.raises(ValueError, match="only takes race drafts"):
        enumerate_verifier(Recursive(Lenience(0.5)), (Kind.RACE,))


def test_enumeration_measures_the_error() -> None:
    assert enumerate_verifier(Recursive(), (Kind.IID,)).error <= TOLERANCE
    assert enumerate_verifier(Recursive(Lenience(0.5)), (Kind.IID,)).distance > 0.05


@dataclass(frozen=True)
class RightFor(Verifier):
    """A right verifier of some drafts, and a lenient one of the others."""

    some: Callable[[Draft], bool]
    lossless: ClassVar[bool] = True
    uses_trees: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        right = Recursive() if self.some(draft) else Recursive(Lenience(0.5))
        return right.verify(draft, scores, noise)


@dataclass(frozen=True)
class Forgetful(Verifier):
    """Verifies every token against the distribution of the first."""

    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        first = as_categorical(scores.distribution)[:, [0] * (draft.nodes + 1)]
        return Recursive().verify(draft, replace(scores, distribution=first), noise)


@pytest.mark.parametrize(
    "verifier",
    [
        RightFor(lambda draft: draft.nodes < 2 or not draft.is_chain),
        RightFor(lambda draft: draft.is_chain),
        Forgetful(),
    ],
    ids=["one token", "chains", "one distribution"],
)
def test_enumeration_goes_deep_and_wide(verifier: Verifier) -> None:
    assert not enumerate_verifier(verifier, (Kind.IID,)).is_exact


def test_the_tiny_distribution_is_the_model_s() -> None:
    model = tiny_llama()
    distribution = joint_distribution(model, 2)
    assert distribution.shape == (5, 5)
    assert float(distribution.sum()) == pytest.approx(1)
    with torch.no_grad():
        first = model(**request(1)).logits[0, -1].double().softmax(-1)
    torch.testing.assert_close(distribution.sum(1), first)


def test_chi_square_by_hand() -> None:
    counts, expected = torch.tensor([30.0, 20.0, 50.0]), torch.tensor([25.0, 25.0, 50.0])
    statistic, cells = chi_square(counts, expected)
    assert (statistic, cells) == (2.0, 3)
    assert p_value(2.0, 2) == pytest.approx(0.36788, abs=1e-5)  # exp(-1)
    assert p_value(chi_square(torch.tensor([5.0, 5.0]), torch.tensor([10.0, 0.0]))[0], 1) == 0
