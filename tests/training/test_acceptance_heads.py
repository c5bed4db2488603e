"""Acceptance heads: fitted to chances, with refusals weighed, and never from nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mmspec.drafters.lengths.learned import StopHead
from mmspec.training.acceptance_heads import fit_head, record_drafts


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_a_head_learns_the_chance_that_its_weight_makes(weight: float) -> None:
    features, labels = torch.zeros(40, 4), torch.tensor([1.0] * 30 + [0.0] * 10)
    before = torch.random.get_rng_state()
    head, loss = fit_head(StopHead, features, labels, 300, 1e-2, 0, weight)
    assert torch.equal(torch.random.get_rng_state(), before)
    chance = 30 * weight / (30 * weight + 10)
    assert head(features[0]).sigmoid().item() == pytest.approx(chance, abs=0.01)
    assert 0 < loss < 1


def test_without_drafts_there_is_nothing_to_learn() -> None:
    silent = SimpleNamespace(features=[], labels=[], generate=lambda: None)
    with pytest.raises(ValueError, match="no token was drafted"):
        record_drafts(lambda shape: shape, silent, [{}])
