"""Certificates of recipes that draw: exact ones pass, wrong claims and relaxed rules do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.bench import certify
from mmspec.bench.certify_images import tiny_pair
from mmspec.bench.tiny_images import CELLS, CODES, SETTINGS, joint, painted, table, tiny_painter
from mmspec.verifiers import Recursive
from mmspec.verifiers.law import ancestral
from tests.bench.test_certify import Hasty


def outcomes(name: str, samples: int = 1000) -> tuple[str, dict[str, str]]:
    found = certify(name, samples=samples, seeds=3, draws=True)
    return found.verdict, {check.name: check.outcome for check in found.checks}


@pytest.mark.parametrize("name", ["sjd", "mc-sjd", "mc-sjd-gumbel", "sjd-pac", "coupled"])
def test_exact_recipes_are_certified_drawing(name: str) -> None:
    verdict, checks = outcomes(name)
    assert verdict == "exact"
    assert checks["frequencies"] == checks["greedy equality"] == "passed"
    ran = "seeded equality" if name == "coupled" else "enumeration"
    assert checks[ran] == "passed"


def test_recipes_with_a_codebook_are_tested_drawing_unasked() -> None:
    found = certify("lantern", samples=1000, seeds=2)
    checks = {check.name: check.outcome for check in found.checks}
    assert found.verdict == "lossy"
    assert checks["enumeration"] == checks["frequencies"] == "lossy"
    assert found.distance is not None
    assert found.distance > 0.01


def test_a_wrong_claim_is_refuted_drawing() -> None:
    wrong = replace(recipes.get("sjd"), verifier=Recursive(Hasty()))
    found = certify(wrong, samples=500, draws=True)
    assert found.verdict == "refuted"
    assert {c.name: c.outcome for c in found.checks}["enumeration"] == "refuted"


def test_the_tiny_law_is_that_of_the_loop() -> None:
    """Two forwards without a cache, against the law behind the loop's prefill and one block."""
    model = tiny_painter()
    law = joint(model, 2)
    assert float(law.sum()) == pytest.approx(1)
    fast = mmspec.accelerate(model, "plain")
    drawing = fast.session.drawing(**painted(1), **SETTINGS)
    _, logits, _ = fast.session.bound.backbone.prefill(drawing.inputs, 8)
    assert_close(law.sum(1), logits[0].double().softmax(-1), atol=1e-5, rtol=1e-5)
    assert_close(ancestral(table(model), CELLS), joint(model, CELLS), atol=1e-12, rtol=0)
    assert law.shape == (CODES, CODES)


def test_every_relaxed_recipe_can_be_bound_to_the_tiny_models() -> None:
    for name in ("lantern", "lantern-pp", "gsd", "cool-sd", "sjd-pp"):
        fast = tiny_pair(recipes.get(name), 0)
        out = fast.generate_images(**painted(2), **SETTINGS, seed=0)
        assert torch.equal(out.ids.flatten(1), out.sequences)
        assert out.stats.fallback is None
