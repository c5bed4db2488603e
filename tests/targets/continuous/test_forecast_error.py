"""Error metrics on numbers small enough to check by hand."""

from __future__ import annotations

import pytest
import torch

from mmspec.targets.continuous.forecast_error import METRICS

FORECAST = torch.tensor([[3.0, 0.0], [2.0, 2.0]])
COMPUTED = torch.tensor([[0.0, 4.0], [2.0, 2.0]])
WANTED = {
    "relative-norm": 1.25,
    "relative-l2": (0.5 * (3e10**2 + 1)) ** 0.5,
    "relative-l1": 0.5 * (3e10 + 1),
    "l1": 3.5,
    "rms": 12.5**0.5,
    "cosine": 1.0,
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str) -> None:
    found = METRICS[name](FORECAST, COMPUTED)
    assert found.shape == (2,)
    assert found[0].item() == pytest.approx(WANTED[name], rel=1e-5)
    assert found[1].item() == pytest.approx(0.0, abs=1e-6)
