"""`certify` proves what is exact and refutes what only claims to be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from mmspec import recipes
from mmspec.bench import certify
from mmspec.bench.enumeration import TOLERANCE, enumerate_verifier
from mmspec.bench.frequency import chi_square, p_value
from mmspec.bench.tiny import joint, request, tiny
from mmspec.draft import Kind
from mmspec.laws.categorical import Categorical
from mmspec.verifiers import Lenience, Recursive


@dataclass(frozen=True)
class Hasty:
    """Claims to be lossless and is not: it corrects from p where it should from the residual."""

    lossless: ClassVar[bool] = True

    def accept(self, p: Categorical, q: Categorical, x: Tensor) -> Tensor:
        return (p.prob(x) / q.prob(x)).clamp_max(1)

    def residual(self, p: Categorical, q: Categorical, x: Tensor) -> Categorical:
        return p


@pytest.mark.parametrize("name", ["coupled", "speculative-sampling", "prompt-lookup"])
def test_exact_recipes_are_certified(name: str) -> None:
    found = certify(name, samples=1000, seeds=3, room=8)
    assert found.verdict == "exact"
    assert not [check for check in found.checks if check.outcome in ("refuted", "lossy")]


def test_a_wrong_claim_is_refuted() -> None:
    wrong = replace(recipes.get("speculative-sampling"), verifier=Recursive(Hasty()))
    found = certify(wrong, samples=1500, room=8)
    assert found.verdict == "refuted"
    outcomes = {check.name: check.outcome for check in found.checks}
    assert outcomes["enumeration"] == outcomes["frequencies"] == "refuted"
    assert outcomes["greedy equality"] == "passed"


def test_a_lossy_recipe_is_called_lossy_and_measured() -> None:
    lossy = replace(recipes.get("speculative-sampling"), verifier=Recursive(Lenience(0.5)))
    found = certify(lossy, samples=1500, room=8)
    assert found.verdict == "lossy"
    assert found.distance is not None
    assert found.distance > 0.02


def test_enumeration_measures_the_error() -> None:
    assert enumerate_verifier(Recursive(), (Kind.IID,)).error <= TOLERANCE
    assert enumerate_verifier(Recursive(Lenience(0.5)), (Kind.IID,)).distance > 0.05


def test_the_tiny_law_is_the_model_s() -> None:
    model = tiny()
    law = joint(model, 2)
    assert law.shape == (5, 5)
    assert float(law.sum()) == pytest.approx(1)
    with torch.no_grad():
        first = model(**request(1)).logits[0, -1].double().softmax(-1)
    torch.testing.assert_close(law.sum(1), first)


def test_chi_square_by_hand() -> None:
    counts, expected = torch.tensor([30.0, 20.0, 50.0]), torch.tensor([25.0, 25.0, 50.0])
    statistic, cells = chi_square(counts, expected)
    assert (statistic, cells) == (2.0, 3)
    assert p_value(2.0, 2) == pytest.approx(0.36788, abs=1e-5)  # exp(-1)
    assert p_value(chi_square(torch.tensor([5.0, 5.0]), torch.tensor([10.0, 0.0]))[0], 1) == 0
