"""Certificates of recipes for continuous tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from mmspec import recipes
from mmspec.bench.certify import certify
from mmspec.draft import Draft, Kind, Scores, Verdict
from mmspec.laws.noise import Noise
from mmspec.modalities.mar.toys import uniform_gap, uniform_p_value
from mmspec.verifiers.path_ratio import PathRatio


@dataclass(frozen=True)
class Credulous:
    """Wrong: keeps whatever was drafted, and claims to be lossless."""

    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        found = PathRatio().verify(draft, scores, noise)
        return replace(found, length=draft.mask.sum(-1)) if draft.nodes else found


@pytest.mark.parametrize(
    ("name", "wanted"), [("cspd-coupled", "exact"), ("cspd", "lossy"), ("credulous", "refuted")]
)
def test_certificates(name: str, wanted: str) -> None:
    plan = recipes.get("cspd-coupled" if name == "credulous" else name)
    if name == "credulous":
        plan = replace(plan, verifier=Credulous())
    found = certify(plan, seeds=5, samples=1000)
    assert found.verdict == wanted
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
