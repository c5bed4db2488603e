"""Certificates of recipes that draw: exact ones pass, wrong claims and relaxed rules do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.bench import certify
from mmspec.modalities.image.measures import SpeculativeGeneration
from mmspec.modalities.image.tiny_models import (
    CELLS,
    CODES,
    SETTINGS,
    UncachedGreedy,
    class_request,
    distribution_table,
    joint,
    tiny_model,
    tiny_pair,
)
from mmspec.recipe import Deferred
from mmspec.verifiers.enumeration import ancestral_joint
from mmspec.verifiers.recursive import Recursive
from tests.bench.test_certify import Hasty


def outcomes(name: str, samples: int = 500) -> tuple[str, dict[str, str]]:
    found = certify(name, samples=samples, seeds=3, modality="image")
    return found.verdict, {check.name: check.outcome for check in found.checks}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sjd", "mc-sjd", "mc-sjd-gumbel", "sjd-pac", "coupled"])
def test_exact_recipes_are_certified_drawing(name: str) -> None:
    verdict, checks = outcomes(name)
    assert verdict == "exact"
    assert checks["frequencies"] == checks["greedy equality"] == "passed"
    ran = "seeded equality" if name == "coupled" else "enumeration"
    assert checks[ran] == "passed"


@pytest.mark.exhaustive
def test_recipes_with_a_codebook_are_tested_by_default() -> None:
    found = certify("lantern", samples=500, seeds=1)
    checks = {check.name: check.outcome for check in found.checks}
    assert found.verdict == "lossy"
    assert checks["enumeration"] == checks["frequencies"] == "lossy"
    assert found.distance is not None
    assert found.distance > 0.01


@pytest.mark.exhaustive
def test_a_wrong_claim_is_refuted_drawing() -> None:
    late = Deferred(lambda kit: Recursive(Hasty()), "recursive, hasty")
    for verifier in (Recursive(Hasty()), late):
        wrong = replace(recipes.get("sjd"), verifier=verifier)
        found = certify(wrong, samples=100, seeds=1, modality="image")
        assert (found.verdict, found.modality) == ("refuted", "image")
    assert {c.name: c.outcome for c in found.checks}["enumeration"] == "refuted"


def test_greedy_codes_are_held_against_distributions_from_scratch() -> None:
    model, request = tiny_model(), {**class_request(2), **SETTINGS, "temperature": 0.0}
    wanted = UncachedGreedy(model).run(request, 0)
    found = SpeculativeGeneration(mmspec.accelerate(model, "plain")).run(request, 0)
    assert (wanted.values, wanted.calls) == (found.values, found.calls)
    plain = {c.name: c.outcome for c in certify("plain", modality="image", samples=500).checks}
    assert (plain["greedy equality"], plain["seeded equality"]) == ("passed", "skipped")


def test_the_tiny_distribution_is_that_of_the_loop() -> None:
    """Two forwards without a cache against the distribution of the loop's prefill and one block."""
    model = tiny_model()
    distribution = joint(model, 2)
    assert float(distribution.sum()) == pytest.approx(1)
    fast = mmspec.accelerate(model, "plain")
    drawing = fast.session.prepare_request(**class_request(1), **SETTINGS)
    _, logits, _ = fast.session.bound.backbone.prefill(drawing.inputs, 8)
    assert_close(distribution.sum(1), logits[0].double().softmax(-1), atol=1e-5, rtol=1e-5)
    assert_close(
        ancestral_joint(distribution_table(model), CELLS), joint(model, CELLS), atol=1e-12, rtol=0
    )
    assert distribution.shape == (CODES, CODES)


def test_every_relaxed_recipe_can_be_bound_to_the_tiny_models() -> None:
    for name in ("lantern", "lantern-pp", "gsd", "cool-sd", "sjd-pp"):
        fast = tiny_pair(recipes.get(name), 0)
        out = fast.generate_images(**class_request(2), **SETTINGS, seed=0)
        assert torch.equal(out.ids.flatten(1), out.sequences)
        assert out.stats.fallback is None
