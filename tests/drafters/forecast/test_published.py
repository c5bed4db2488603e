"""Forecasts compared with the factors of the published code, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from mmspec.drafters.forecast.forecast import Taylor
from mmspec.drafters.forecast.hooks import Extrapolation, Forecasting
from mmspec.verifiers.forecast_gate import fixed_cadence


@dataclass
class Published:
    """The factors of one feature, as the authors' code keeps them (TaylorSeer, SpeCa)."""

    order: int
    first: int  # its first_enhance
    factors: list[Tensor] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def record(self, step: int, feature: Tensor) -> None:
        self.steps.append(step)
        fresh = [feature]
        for old in self.factors[: self.order] if step > self.first - 2 else []:
            fresh.append((fresh[-1] - old) / (self.steps[-1] - self.steps[-2]))
        self.factors = fresh

    def forecast(self, step: int) -> Tensor:
        ahead = step - self.steps[-1]
        terms = [f * ahead**j / math.factorial(j) for j, f in enumerate(self.factors)]
        return torch.stack(terms).sum(0)


@pytest.mark.parametrize("warm_up", [1, 2, 3, 4])
@pytest.mark.parametrize("order", [0, 1, 2, 4])
def test_differences_begin_where_they_do_in_the_published_code(order: int, warm_up: int) -> None:
    """The network's output, in full and by forecast, at each of 16 steps."""

    class Echo(nn.Module):
        def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
            return sample

    network, steps = Echo(), 16
    features = torch.randn(steps, 2, 3, generator=torch.Generator().manual_seed(0)).cumsum(0)
    how = Extrapolation(Taylor(), order, lite=True)
    attachment = Forecasting(fixed_cadence(4, warm_up), how).attach_to(network, lambda: steps)
    past, forecasts = Published(order, warm_up), 0
    for step, feature in enumerate(features):
        found = network(feature, torch.tensor(float(-step)))
        if step < warm_up or forecasts == 3:
            past.record(step, feature)
            expected, forecasts = feature, 0
        else:
            expected, forecasts = past.forecast(step), forecasts + 1
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    attachment()
