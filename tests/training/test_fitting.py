"""The training loop leaves the processor as it found it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmspec.training.fitting import CosineDecay, ScheduledOptimizer


@pytest.mark.parametrize("flushed", [False, True])
def test_steps_take_tiny_numbers_for_zero_and_leave_the_processor_as_it_was(flushed: bool) -> None:
    seen: list[float] = []
    weight = nn.Parameter(torch.ones(3))

    def tiny() -> float:
        return float(torch.tensor(1e-39).mul(1.0))

    def loss() -> torch.Tensor:
        seen.append(tiny())
        return weight.sum()

    torch.set_flush_denormal(flushed)
    try:
        ScheduledOptimizer([weight], CosineDecay(1, 1e-3)).step([loss])
        assert seen == [0.0]
        assert (tiny() == 0.0) == flushed
    finally:
        torch.set_flush_denormal(False)


def test_a_step_that_fails_leaves_the_processor_as_it_was() -> None:
    weight = nn.Parameter(torch.ones(3))

    def loss() -> torch.Tensor:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        ScheduledOptimizer([weight], CosineDecay(1, 1e-3)).step([loss])
    assert float(torch.tensor(1e-39).mul(1.0)) > 0
