"""The work that forecasts skip, against FLOPs counted in every pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import mmspec
from mmspec.drafters.forecast.attached import Statistics
from mmspec.drafters.forecast.hooks import Extrapolation, Forecasting
from mmspec.drafters.forecast.steps import StepClock
from mmspec.drafters.forecast.work import FlopCounter, PassWork, count_work
from mmspec.targets.continuous.forecast_schedule import DecayingThreshold
from mmspec.verifiers.forecast_gate import ForecastGate, fixed_cadence
from tests.drafters.forecast.networks import PIPELINES, STEPS, draw
from tests.toys.pipelines import pipeline

Arguments = dict[str, Any]
CHECKED = ForecastGate(DecayingThreshold(base=1e9, least=0, most=3, warm_up=1), per_sample=False)
SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 4}


def prx(tokens: int = 16) -> tuple[nn.Module, Arguments]:
    """Feed-forward layers whose parts are children of the block."""
    network = diffusers.PRXTransformer2DModel(
        in_channels=4, patch_size=1, context_in_dim=8, hidden_size=32, num_heads=2, depth=2,
        axes_dim=[8, 8],
    )  # fmt: skip
    states, words = torch.randn(2, 4, 4, tokens // 4), torch.randn(2, 3, 8)
    return network, {"hidden_states": states, "encoder_hidden_states": words}


def auraflow() -> tuple[nn.Module, Arguments]:
    """Half of its blocks are joint."""
    network = diffusers.AuraFlowTransformer2DModel(
        **SIZES, patch_size=1, num_mmdit_layers=2, num_single_dit_layers=2, joint_attention_dim=16,
        caption_projection_dim=16, pos_embed_max_size=16,
    )  # fmt: skip
    states, words = torch.randn(2, 4, 4, 4), torch.randn(2, 3, 16)
    return network, {"hidden_states": states, "encoder_hidden_states": words}


def cogview4(words: int = 3) -> tuple[nn.Module, Arguments]:
    """One feed-forward layer for two streams, called twice in a block."""
    network = diffusers.CogView4Transformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        out_channels=4, text_embed_dim=8, time_embed_dim=8, condition_dim=4, rope_axes_dim=(8, 8),
    )  # fmt: skip
    sizes = torch.tensor([[4.0, 4.0]] * 2)
    given = {"original_size": sizes, "target_size": sizes, "crop_coords": 0 * sizes}
    states = torch.randn(2, 4, 4, 4)
    return network, {
        "hidden_states": states, "encoder_hidden_states": torch.randn(2, words, 8), **given,
    }  # fmt: skip


def latte() -> tuple[nn.Module, Arguments]:
    """Rows of its layers are frames of a clip, not the rows of the batch."""
    network = diffusers.LatteTransformer3DModel(
        **SIZES, num_layers=2, patch_size=2, in_channels=4, out_channels=4, cross_attention_dim=16,
        caption_channels=8, norm_type="ada_norm_single", attention_bias=True, video_length=2,
    )  # fmt: skip
    return network, {
        "hidden_states": torch.randn(2, 4, 2, 4, 4), "encoder_hidden_states": torch.randn(2, 3, 8),
    }  # fmt: skip


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Arguments]]] = {
    "prx": prx, "auraflow": auraflow, "cogview4": cogview4, "latte": latte,
}  # fmt: skip


class EveryCall(StepClock):
    """Every call is a step, although the time stays."""

    def step_at(self, time: list[float]) -> int:
        self.step += 1
        return self.step


def run(
    network: nn.Module, given: Arguments, how: Forecasting, steps: int = 4
) -> tuple[list[Tensor], list[int], Statistics]:
    """Outputs and operations of each call at one input, and the statistics."""
    attachment = how.attach_to(network, lambda: steps, 2, EveryCall())
    outputs, operations = list[Tensor](), list[int]()
    try:
        for _ in range(steps):
            with torch.no_grad(), FlopCounter() as counter:
                outputs.append(network(**given, timestep=torch.full((2,), 0.5))[0])
            operations.append(counter.total)
    finally:
        attachment()
    return outputs, operations, attachment.statistics


def build(name: str) -> tuple[nn.Module, Arguments]:
    torch.manual_seed(0)
    network, given = NETWORKS[name]()
    return network.eval(), given


@pytest.mark.parametrize("lite", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_skipped_work_is_what_passes_do_not_compute(name: str, lite: bool) -> None:
    network, given = build(name)
    how = Forecasting(CHECKED if lite else fixed_cadence(2, 1), Extrapolation(lite=lite))
    outputs, operations, statistics = run(network, given, how)
    whole, rest = operations[0], sum(operations)
    assert statistics.skipped_work == pytest.approx(1 - rest / (4 * whole), abs=1e-9)
    assert all(torch.allclose(one, outputs[0], atol=1e-5) for one in outputs[1:])  # nothing moved


@pytest.mark.parametrize(("name", "most"), [("prx", 0.2), ("auraflow", 0.2), ("cogview4", 0.2)])
def test_a_forecast_step_skips_attention_and_feed_forward(name: str, most: float) -> None:
    network, given = build(name)
    _, operations, statistics = run(network, given, Forecasting(fixed_cadence(2, 1)))
    assert statistics.forecast_work == operations[1] / operations[0] < most


def test_both_streams_of_a_shared_layer_keep_their_own_features() -> None:
    """With as many words as patches a mistake would pass unnoticed."""
    torch.manual_seed(0)
    network, given = cogview4(words=16)
    outputs, _, _ = run(network.eval(), given, Forecasting(fixed_cadence(4, 1)))
    assert torch.allclose(outputs[1], outputs[0], atol=1e-6)


def test_samples_without_rows_of_their_own_are_not_checked_one_by_one() -> None:
    network, given = build("latte")
    gate = ForecastGate(DecayingThreshold(least=0))
    with pytest.raises(ValueError, match=r"returns 4 rows for a batch of 2.*per_sample=False"):
        run(network, given, Forecasting(gate))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *(("dit", recipe) for recipe in ("taylorseer", "speca", "first-block-cache")),
        *(
            pytest.param("flux", recipe, marks=pytest.mark.exhaustive)
            for recipe in ("taylorseer", "speca", "first-block-cache")
        ),
        *(
            pytest.param("sd3", recipe, marks=pytest.mark.exhaustive)
            for recipe in ("taylorseer", "speca")
        ),
    ],
)
def test_the_statistics_of_a_call_count_it(name: str, recipe: str) -> None:
    given: Arguments = {"threshold": 10.0} if recipe == "first-block-cache" else {"warm_up": 1}
    pipe = PIPELINES[name]()
    fast: Any = mmspec.accelerate(pipe, recipe, **given)
    mine, plain = count_operations(pipe, fast), count_operations(pipe)
    stats = fast.last_stats
    assert stats.skipped_work == pytest.approx(1 - mine / plain, abs=1e-9)
    assert 0 < stats.skipped_work < stats.unverified_tokens / stats.num_new_tokens
    assert stats.to_dict()["skipped_work"] == stats.skipped_work


def count_operations(pipe: Any, calling: Any = None) -> int:
    """Operations of the network in a call of the pipeline."""
    marks = list[int]()
    with FlopCounter() as counter:
        hooks = (
            pipe.transformer.register_forward_pre_hook(lambda *given: marks.append(counter.total)),
            pipe.transformer.register_forward_hook(lambda *given: marks.append(counter.total)),
        )
        draw(pipe, calling=calling)
    for hook in hooks:
        hook.remove()
    return sum(marks[1::2]) - sum(marks[::2])


def test_forecasts_of_the_output_skip_whole_steps() -> None:
    pipe = PIPELINES["dit"]()
    fast: Any = mmspec.accelerate(pipe, "taylorseer", lite=True, interval=2, warm_up=2)
    draw(pipe, calling=fast)
    assert fast.last_stats.skipped_work == 1 - fast.last_stats.target_calls / STEPS


def test_chains_have_no_skipped_work() -> None:
    fast: Any = mmspec.accelerate(pipeline("ddpm"), "paradigms")
    fast(num_inference_steps=3, output_type="np", seed=0)
    assert fast.last_stats.skipped_work is None


def test_a_network_that_hides_its_layers_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = PIPELINES["dit"]()
    for block in pipe.transformer.transformer_blocks:  # the feed-forward layer under another name
        layer = block.ff
        del block.ff
        block.own, block.__dict__["ff"] = nn.Sequential(layer), layer
    fast: Any = mmspec.accelerate(pipe, "taylorseer", warm_up=1)
    with caplog.at_level(logging.WARNING, "mmspec"):
        draw(pipe, calling=fast)
        draw(pipe, calling=fast)
    found = [one.getMessage() for one in caplog.records if "operations" in one.getMessage()]
    assert len(found) == 1
    assert "still computes 64 %" in found[0]
    assert "lite=True" in found[0]


def test_attention_is_counted_by_its_shapes() -> None:
    """Two heads of keys for four heads of queries, in and out of inference mode."""
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), FlopCounter() as counter:
            scaled_dot_product_attention(query, key, key, enable_gqa=True)
            nn.functional.linear(query, key[0, 0])
        assert counter.total == 4 * 5 * 7 * (2 * 8 + 2 * 8) + 2 * 4 * 5 * 8 * 7


def test_work_of_modules_is_shared_out() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 12)
    block = nn.Sequential(first, second)
    output, work = count_work(lambda: block(torch.ones(2, 4)), [first], block)
    assert output.shape == (2, 12)
    assert work == PassWork(forecast=0.75, check=1.0)
    assert not block._forward_hooks
    assert not first._forward_pre_hooks
