"""Judges: what they accept, what comes out, and what a run reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.verifiers.distances import measure
from mmspec.verifiers.judge import JudgedTokens, JudgeHead
from tests import toys
from tests.partners import noisy

P, Q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
ROOM = 12


def judge(bias: float, size: int = 64) -> JudgeHead:
    head = JudgeHead(size)
    torch.nn.init.zeros_(head.linear.weight)
    torch.nn.init.constant_(head.linear.bias, bias)
    return head


def test_the_output_of_a_judged_step() -> None:
    """q a + (1 - sum q a) norm((p - q)+), with a = 1 for what the judge accepts."""
    nothing, second = torch.zeros(3, dtype=torch.bool), torch.tensor([False, True, False])
    torch.testing.assert_close(measure(JudgedTokens(nothing), P, Q).output, P)
    step = measure(JudgedTokens(second), P, Q)
    torch.testing.assert_close(step.output, torch.tensor([0.3, 0.5, 0.2]).double())
    torch.testing.assert_close(step.distance, torch.tensor(0.2).double())


class FromTheTarget(JudgedTokens):
    """Wrong: corrections from p in place of norm((p - q)+)."""

    def residual(self, p: Any, q: Any, x: Any) -> Any:
        return p


def test_corrections_from_the_target_are_found_out() -> None:
    output = measure(FromTheTarget(torch.zeros(3, dtype=torch.bool)), P, Q).output
    torch.testing.assert_close(output, torch.tensor([0.35, 0.39, 0.26]).double())


def test_a_judge_decides_between_target_and_drafter(tmp_path: Path) -> None:
    """One that refuses all: the target's tokens. One that accepts all: the drafter's."""
    model, drafter = toys.model("llama"), noisy("llama", scale=0.3)
    request = toys.inputs("llama", seed=1)
    judge(-9.0).save(tmp_path / "judge.safetensors")
    strict = mmspec.accelerate(
        model, "judge", drafter=drafter, judge=str(tmp_path / "judge.safetensors")
    )
    out = strict.generate(**request, max_new_tokens=ROOM)
    assert torch.equal(out.sequences, model.generate(**request, max_new_tokens=ROOM))
    assert out.stats.over_accepted_mass == 0
    kind = mmspec.accelerate(model, "judge", drafter=drafter, judge=judge(9.0))
    out = kind.generate(**request, max_new_tokens=ROOM)
    assert not torch.equal(out.sequences, model.generate(**request, max_new_tokens=ROOM))
    assert out.stats.draft_acceptance_rate > 0.9
    assert out.stats.over_accepted_mass is not None
    assert out.stats.over_accepted_mass > 0
    assert not kind.recipe.exact
    with pytest.raises(ValueError, match=r"width 3, but those of the target have 64"):
        mmspec.accelerate(model, "judge", drafter=drafter, judge=judge(0.0, 3))
    (tmp_path / "other.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match="no judge"):
        JudgeHead.load(tmp_path / "other.safetensors")
