"""The cache of diffusers, attached for one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.drafters.forecast.first_block import FirstBlockCache
from mmspec.verifiers.first_block import FirstBlockGate
from mmspec.verifiers.forecast_gate import ForecastGate
from tests.drafters.forecast.networks import PIPELINES, STEPS, dit, draw


def _draw_image(pipe: Any, threshold: float) -> tuple[torch.Tensor, int, int]:
    attachment = FirstBlockCache().under(FirstBlockGate(threshold)).attach(pipe, 2)
    try:
        found = draw(pipe)
    finally:
        attachment()
    return found, attachment.statistics.full, attachment.statistics.forecast


@pytest.mark.parametrize("name", ["dit", "flux"])
def test_the_threshold_is_the_option(name: str) -> None:
    """Below 0 nothing is skipped, bit for bit; at infinity everything after the first step is."""
    pipe, calls = PIPELINES[name](), STEPS * (2 if name == "flux" else 1)
    plain = draw(pipe)
    before = [set(vars(module)) for module in pipe.transformer.modules()]
    found, full, skipped = _draw_image(pipe, -1.0)
    assert torch.equal(found, plain)
    assert (full, skipped) == (calls, 0)
    found, full, skipped = _draw_image(pipe, float("inf"))
    assert not torch.equal(found, plain)
    assert (full, skipped) == (calls // STEPS, calls - calls // STEPS)
    assert [set(vars(module)) for module in pipe.transformer.modules()] == before
    assert torch.equal(draw(pipe), plain)


def test_what_the_cache_of_diffusers_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="has no text stream"):
        FirstBlockCache(0.1).attach(PIPELINES["sd3"]())
    with pytest.raises(ValueError, match="does not judge the first block"):
        FirstBlockCache().under(ForecastGate())
    pipe = dit()
    attachment = FirstBlockCache(0.1).attach(pipe)
    with pytest.raises(ValueError, match="already has a cache"):
        FirstBlockCache(0.1).attach(pipe)
    attachment()
    with pytest.raises(ValueError, match="recipe first-block-cache"):
        FirstBlockGate().verify(None, None, None)  # type: ignore[arg-type]
