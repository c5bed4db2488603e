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
def test_the_threshold_is_the_knob(name: str) -> None:
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


def test_calls_within_a_step_have_states_of_their_own() -> None:
    """In diffusers a state belongs to a context; here the k-th call of a step has the k-th."""
    network = PIPELINES["flux"]().transformer
    attachment = FirstBlockCache(1e9).attach(_Holder(network))
    found = []
    for time in (3, 2, 1):
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                output = network(
                    hidden_states=torch.randn(1, 4, 16, generator=generator),
                    encoder_hidden_states=torch.randn(1, 3, 12, generator=generator),
                    pooled_projections=torch.randn(1, 6, generator=generator),
                    timestep=torch.tensor([time / 10]),
                    txt_ids=torch.zeros(3, 3),
                    img_ids=torch.rand(4, 3, generator=generator),
                ).sample
            found.append(output)
    attachment()
    assert (attachment.statistics.full, attachment.statistics.forecast) == (2, 4)
    for step in (2, 4):  # what a call is answered is near its own first answer
        own = (found[step] - found[0]).norm()
        assert own < (found[step] - found[1]).norm()


class _Holder:
    """The part of a pipeline that names its components."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.components = {"transformer": network}


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
