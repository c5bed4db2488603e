"""TeaCache: what decides is the change of the first block's modulated input, rescaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mmspec
from mmspec.drafters.forecast.modulated import PUBLISHED, ModulatedCache, fit_change
from mmspec.verifiers.cached_steps import AccumulatedChangeGate
from mmspec.verifiers.first_block import FirstBlockGate
from tests.drafters.forecast.networks import PIPELINES, STEPS, draw
from tests.toys.pipelines import build_request, pipeline


class _Recorder:
    """The modulated inputs of a network's first block, and the states after its last one."""

    def __init__(self, network: nn.Module) -> None:
        self.inputs: list[Tensor] = []
        self.states: list[Tensor] = []
        blocks = network.get_submodule("transformer_blocks")
        first, last = blocks.get_submodule("0"), list(blocks.children())[-1]
        norm = first.get_submodule("norm1")  # returns gates too
        self.handles = [
            norm.register_forward_hook(lambda *given: self.inputs.append(given[2][0])),
            last.register_forward_hook(lambda *given: self.states.append(given[2])),
        ]

    def close(self) -> None:
        for one in self.handles:
            one.remove()


def _changes(states: list[Tensor]) -> list[float]:
    pairs = zip(states[1:], states, strict=False)
    return [float((a - b).abs().mean() / b.abs().mean()) for a, b in pairs]


def _decide(changes: list[float], coefficients: list[float], threshold: float) -> list[bool]:
    """Which steps TeaCache computes: the published loop, written out."""
    full, total = [True], 0.0
    for step, change in enumerate(changes, 1):
        total += float(np.polyval(coefficients, change))
        if step == len(changes) or total >= threshold:
            full.append(True)
            total = 0.0
        else:
            full.append(False)
    return full


def test_decisions_are_those_of_the_published_loop() -> None:
    """The adaptive norm of FLUX gives what its attention reads; its changes decide."""
    pipe = PIPELINES["flux"]()
    watched, coefficients = _Recorder(pipe.transformer), [2.0, 0.5, 0.01]
    fast: Any = mmspec.accelerate(pipe, "tea-cache", threshold=0.1, coefficients=coefficients)
    seen: list[bool] = []
    draw(
        pipe,
        calling=fast,
        true_cfg_scale=1.0,
        on_round=lambda round_: seen.append(round_.calls > 0),
    )
    watched.close()
    full = fast.last_stats.target_calls
    assert 2 < full < STEPS
    # a full step runs the norm twice: to read the modulated input, and in the block itself
    inputs, index = [], 0
    for computed in seen:
        inputs.append(watched.inputs[index])
        index += 1 + computed
    assert index == len(watched.inputs)
    assert seen == _decide(_changes(inputs), coefficients, 0.1)
    assert seen != _decide(_changes(inputs), [3.0, 0.0], 0.1)  # rescaled otherwise


@pytest.mark.exhaustive
def test_coefficients_are_fitted_once_and_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = pipeline("dit")
    request = {**build_request("dit", 2), "num_inference_steps": 10, "output_type": "pt"}
    fast: Any = mmspec.accelerate(pipe, "tea-cache", threshold=2.0)
    fast(**{**request, "num_inference_steps": 3}, seed=3)
    assert fast.saved_parts == {"threshold": 2.0}  # too few steps
    assert ["skips none of 3 steps" in one for one in caplog.messages] == [True]
    caplog.clear()
    watched = _Recorder(pipe.transformer)
    fast(**request, seed=3)
    assert fast.last_stats.unverified_tokens == 0
    watched.close()
    (fitted,) = fast.saved_parts["coefficients"]
    assert "coefficients=" in caplog.text
    inputs, outputs = _changes(watched.inputs[::2]), _changes(watched.states)
    assert len(outputs) == 9
    assert fitted == pytest.approx(list(np.polyfit(inputs, outputs, 2)), rel=1e-3, abs=1e-5)
    skipping = fast(**request, seed=3).images
    assert fast.last_stats.unverified_tokens > 0
    fast.save_pretrained(tmp_path)
    again: Any = mmspec.load(tmp_path, pipe)
    assert torch.equal(torch.as_tensor(again(**request, seed=3).images), torch.as_tensor(skipping))
    assert len(caplog.messages) == 1


def test_the_fit_is_a_polynomial_of_the_change() -> None:
    changes = np.linspace(0.01, 0.3, 24)
    truth = [30.0, -12.0, 2.0, 0.8, 0.01]
    assert np.allclose(
        fit_change(list(changes), list(np.polyval(truth, changes))), truth, atol=1e-3
    )
    assert len(fit_change([0.1, 0.2, 0.3], [0.2, 0.4, 0.6])) == 2


@pytest.mark.exhaustive
def test_published_coefficients_are_those_of_a_class() -> None:
    assert all(hasattr(diffusers, name) for name in PUBLISHED)
    pipe = PIPELINES["flux"]()
    fast: Any = mmspec.accelerate(pipe, "tea-cache", threshold=1e9)
    draw(pipe, calling=fast)
    assert fast.last_stats.unverified_tokens > 0  # in the first call
    assert fast.saved_parts["coefficients"] == [list(PUBLISHED["FluxTransformer2DModel"])]
    fitted: Any = mmspec.accelerate(pipe, "tea-cache", coefficients="fit")
    draw(pipe, calling=fitted)
    assert fitted.last_stats.unverified_tokens == 0
    assert fitted.saved_parts["coefficients"] != fast.saved_parts["coefficients"]
    pipe.transformer = torch.compile(pipe.transformer)  # by its own class, not the wrapper's
    compiled: Any = mmspec.accelerate(pipe, "tea-cache")
    assert compiled.saved_parts["coefficients"] == fast.saved_parts["coefficients"]


def test_what_does_not_fit_is_refused() -> None:
    pipe = PIPELINES["sd3"]()
    with pytest.raises(ValueError, match="has no text stream, which TeaCache by the hooks"):
        draw(pipe, calling=mmspec.accelerate(pipe, "tea-cache"))
    for wrong in ("flux", [], [[1.0], ["a"]], [[1.0], 2.0], [float("nan")]):
        with pytest.raises(ValueError, match="coefficients="):
            mmspec.accelerate(pipe, "tea-cache", coefficients=wrong)
    flux = PIPELINES["flux"]()
    with pytest.raises(ValueError, match="lists for 2 networks, but this pipeline has 1"):
        draw(flux, calling=mmspec.accelerate(flux, "tea-cache", coefficients=[[1.0], [1.0]]))
    assert not flux.transformer._forward_hooks
    with pytest.raises(ValueError, match="give verifier= an AccumulatedChangeGate"):
        ModulatedCache().under(FirstBlockGate())
    assert ModulatedCache().under(AccumulatedChangeGate(0.1)).gate is not None
