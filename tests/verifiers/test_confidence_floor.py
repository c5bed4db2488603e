"""Confidence floor: confident drafts are accepted without the target."""

from __future__ import annotations

import pytest

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Kind
from mmspec.verifiers.confidence_floor import ConfidenceFloor
from mmspec.verifiers.distances import measure
from mmspec.verifiers.enumeration import (
    enumerate_emitted,
)
from tests.verifiers.test_coarse_groups import PAIRS, close


@pytest.mark.parametrize("floor", [0.0, 0.3, 0.5, 0.8, 1.5])
def test_confident_drafts_skip_the_target(floor: float) -> None:
    for p, q in PAIRS:
        is_sure = bool(q.max() >= floor)
        step = measure(ConfidenceFloor(floor), p, q)
        assert step.accept.unique().tolist() == [float(is_sure)]
        close(step.output, q if is_sure else p)
        greedy = Categorical(q.log() + 3, hard=True)  # the distribution behind the point mass
        taken = enumerate_emitted(p, greedy, ConfidenceFloor(floor), kind=Kind.IID)
        close(taken, greedy.probs if is_sure else p)
