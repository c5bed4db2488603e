"""The caches of diffusers, attached for one call: theirs decide, ours is what their hooks need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, MagCacheConfig
from diffusers.hooks import (
    FirstBlockCacheConfig,
    PyramidAttentionBroadcastConfig,
)

import mmspec
from mmspec.drafters.forecast.broadcast import AttentionBroadcast
from mmspec.drafters.forecast.first_block import FirstBlockCache
from mmspec.drafters.forecast.magnitude import MagnitudeCache
from mmspec.drafters.forecast.spectral import SpectralCache
from mmspec.verifiers.cached_steps import AccumulatedChangeGate, BroadcastGate, MagnitudeGate
from mmspec.verifiers.first_block import FirstBlockGate
from tests.drafters.forecast.networks import PIPELINES, STEPS, draw

RATIOS = [1.0, 0.99, 1.01, 0.97, 1.0, 1.02, 0.99, 1.0]
OFF: dict[str, dict[str, Any]] = {  # options at which nothing is reused
    "first-block-cache": {"threshold": -1.0},
    "mag-cache": {"threshold": -1.0, "ratios": RATIOS},
    "sea-cache": {"threshold": 0.0},
    "tea-cache": {"threshold": 0.0, "coefficients": [1.0, 0.0]},
    "pab": {"spatial": 1, "temporal": 1, "cross": 1},
}
MOST: dict[str, dict[str, Any]] = {  # as much as the hooks allow
    "first-block-cache": {"threshold": 1e9},
    "mag-cache": {"threshold": 1e9, "most": 9, "retention": 0.0, "ratios": RATIOS},
    "sea-cache": {"threshold": 1e9, "most": 0},
    "tea-cache": {"threshold": 1e9, "coefficients": [1.0, 0.0]},
    "pab": {"spatial": 9, "begin": 2000.0, "end": -1.0},
}
FULL = {  # steps with MOST
    **{"first-block-cache": 1, "mag-cache": 1, "pab": 1},
    **{"sea-cache": 2, "tea-cache": 2},  # the last step too
}


def _accelerate(pipe: Any, name: str, options: dict[str, Any]) -> Any:
    return mmspec.accelerate(pipe, name, **options)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("dit", name) for name in OFF if name != "first-block-cache"),
        *(pytest.param("flux", name, marks=pytest.mark.exhaustive) for name in OFF),
        *(pytest.param("sd3", name, marks=pytest.mark.exhaustive) for name in ("mag-cache", "pab")),
    ],
)
def test_from_nothing_to_everything_and_back(family: str, name: str) -> None:
    """Off is the pipeline bit for bit; at the other end only forced steps are full."""
    pipe, calls = PIPELINES[family](), 2 if family == "flux" else 1
    plain = draw(pipe)
    before = [set(vars(module)) for module in pipe.transformer.modules()]
    fast = _accelerate(pipe, name, OFF[name])
    assert torch.equal(draw(pipe, calling=fast), plain)
    assert fast.last_stats.target_calls == calls * STEPS
    assert fast.last_stats.skipped_work == 0
    fast = _accelerate(pipe, name, MOST[name])
    found = draw(pipe, calling=fast)
    assert not torch.equal(found, plain)
    assert fast.last_stats.target_calls == calls * FULL[name]
    assert torch.equal(draw(pipe, calling=fast), found)  # no state is left from the first call
    assert [set(vars(module)) for module in pipe.transformer.modules()] == before
    assert torch.equal(draw(pipe), plain)


def _enable_broadcast(pipe: Any) -> Any:
    clock = iter(float(one) for one in pipe.scheduler.timesteps for _ in range(4))  # per layer
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        current_timestep_callback=lambda: next(clock),
    )


OWN: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "first-block-cache": ({"threshold": 0.5}, lambda pipe: FirstBlockCacheConfig(0.5)),
    "mag-cache": (
        {"threshold": 0.05, "ratios": RATIOS},
        lambda pipe: MagCacheConfig(0.05, num_inference_steps=STEPS, mag_ratios=RATIOS),
    ),
    "pab": ({}, _enable_broadcast),
}


@pytest.mark.parametrize("name", OWN)
def test_images_are_those_of_diffusers(name: str) -> None:
    """One call per step needs nothing from us, so enable_cache() gives the same image."""
    pipe = PIPELINES["flux"]()
    options, config = OWN[name]
    given: dict[str, Any] = {"true_cfg_scale": 1.0}
    fast = _accelerate(pipe, name, options)
    found = draw(pipe, calling=fast, **given)
    assert 0 < fast.last_stats.unverified_tokens < STEPS
    pipe.transformer.enable_cache(config(pipe))
    expected = draw(pipe, **given)
    pipe.transformer.disable_cache()
    assert torch.equal(found, expected)
    assert not torch.equal(found, draw(pipe, **given))


class _Holder:
    """The parts of a pipeline that a cache reads."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.components = {"transformer": network}
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.scheduler.set_timesteps(3)


@pytest.mark.parametrize(
    ("cache", "full"),
    [
        (FirstBlockCache(1e9), 2),
        (MagnitudeCache(MagnitudeGate(1e9, 9, 0.0), [[1.0] * 3]), 2),
        (AttentionBroadcast(BroadcastGate(9, begin=2000, end=-1)), 2),
        (SpectralCache(0, AccumulatedChangeGate(1e9)), 4),  # the last step is full
    ],
    ids=lambda one: type(one).__name__,
)
def test_calls_within_a_step_have_states_of_their_own(cache: Any, full: int) -> None:
    """In diffusers a state belongs to a context, or to the layer; here the k-th call has one.

    Without it the second call of the first step would reuse what the first one computed.
    """
    network = PIPELINES["flux"]().transformer
    attachment = cache.attach(_Holder(network))
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
    assert (attachment.statistics.full, attachment.statistics.forecast) == (full, 6 - full)
    for step in (2, 4):  # what a call returns is near its own first output
        assert (found[step] - found[0]).norm() < (found[step] - found[1]).norm()


def test_ratios_are_measured_once_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    pipe = PIPELINES["flux"]()
    plain = draw(pipe)
    fast = _accelerate(pipe, "mag-cache", {"threshold": 0.3, "retention": 0.0})
    with pytest.raises(TypeError):
        draw(pipe, calling=fast, callback_on_step_end=lambda *_, **__: 1 + None)  # type: ignore[operator]
    assert torch.equal(draw(pipe, calling=fast), plain)
    assert not fast.last_stats.unverified_tokens
    assert len(caplog.messages) == 1
    ratios = caplog.messages[0].split("ratios=")[1]
    skipping = draw(pipe, calling=fast)
    count = fast.last_stats.unverified_tokens
    assert count > 0
    measured = [float(one) for one in ratios.strip("[]").split(",")]
    assert len(measured) == STEPS
    assert measured[0] == 1
    given = _accelerate(pipe, "mag-cache", {"threshold": 0.3, "retention": 0.0, "ratios": measured})
    assert torch.equal(draw(pipe, calling=given), skipping)
    assert fast.saved_parts["ratios"] == [measured]  # by save_pretrained
    draw(pipe, calling=given, num_inference_steps=2 * STEPS)  # interpolated
    assert given.last_stats.unverified_tokens > count
    assert len(caplog.messages) == 1


@pytest.mark.exhaustive
def test_one_step_measures_no_ratio(caplog: pytest.LogCaptureFixture) -> None:
    """Its only ratio is 1 in any network, by which later calls would skip all they may."""
    pipe = PIPELINES["flux"]()
    fast = _accelerate(pipe, "mag-cache", {})
    draw(pipe, calling=fast, num_inference_steps=1)
    assert fast.saved_parts == {}
    assert ["skips none of 1 steps" in one for one in caplog.messages] == [True]
    draw(pipe, calling=fast)
    assert not fast.last_stats.unverified_tokens
    assert len(fast.saved_parts["ratios"][0]) == STEPS


def test_what_does_not_fit_is_refused() -> None:
    pipe = PIPELINES["sd3"]()
    with pytest.raises(ValueError, match=r"has no text stream, which diffusers' SeaCache requires"):
        draw(pipe, calling=_accelerate(pipe, "sea-cache", {}))
    options: tuple[dict[str, Any], ...] = (
        {"ratios": [[1.0], ["a"]]},
        {"ratios": ["a"]},
        {"ratios": "flux"},
    )
    for option in options:
        with pytest.raises(ValueError, match="ratios="):
            _accelerate(pipe, "mag-cache", option)
    with pytest.raises(ValueError, match=r"ratios=\[\] has an empty list"):
        _accelerate(pipe, "mag-cache", {"ratios": []})
    with pytest.raises(ValueError, match=r"lists for 2 networks, but this pipeline has 1"):
        draw(pipe, calling=_accelerate(pipe, "mag-cache", {"ratios": [[1.0], [1.0]]}))
    with pytest.raises(ValueError, match=r"begin=100 must be above end=800"):
        _accelerate(pipe, "pab", {"begin": 100, "end": 800})
    with pytest.raises(ValueError, match="spatial=0 must be"):
        _accelerate(pipe, "pab", {"spatial": 0})
    with pytest.raises(ValueError, match="order=2 must be 0"):
        _accelerate(pipe, "sea-cache", {"order": 2})
    for cache in (MagnitudeCache(), SpectralCache(), AttentionBroadcast()):
        with pytest.raises(ValueError, match=r"give verifier= an? .*Gate"):
            cache.under(FirstBlockGate())
