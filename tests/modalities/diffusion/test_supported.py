"""Pipelines and lengths at the limits of support: they run, or are refused with an error."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

import mmspec
from tests.covering import covering
from tests.modalities.sampling import (
    FROZEN,
    PLAIN,
    STEPS,
    draw,
    run_pipeline_alone,
    shared_pipeline,
)
from tests.toys.embedded_pipelines import build_pipeline
from tests.toys.image_to_image_pipelines import from_picture
from tests.toys.pipelines import pipeline


@pytest.mark.parametrize(
    ("name", "more"), [("ddpm", {}), ("ddim", {"eta": 1.0}), ("sd", {}), ("sdxl", {}), ("flux", {})]
)
def test_a_chain_of_one_step_is_the_pipelines_own(name: str, more: dict[str, Any]) -> None:
    """Its only step draws no noise, which is no lack of the sampler."""
    pipe, more = shared_pipeline(name), {"num_inference_steps": 1, **more}
    expected = run_pipeline_alone(pipe, 2, lambda one: draw(pipe, name, generator=one, **more))
    for recipe in ("asd", "accelerated-diffusion-carried"):
        fast: Any = mmspec.accelerate(pipe, recipe)
        found = draw(fast, name, generator=torch.Generator().manual_seed(5), **more)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert fast.last_stats.target_calls == 1


@pytest.mark.parametrize("name", ["sd", "sd-image"])
def test_sde_dpm_of_order_2_is_the_pipelines_own(name: str) -> None:
    """ "DPM++ 2M SDE": the step depends on the prediction before, but not in the first one."""
    if name == "sd":
        pipe, given = pipeline("sd"), dict[str, Any](prompt="a red square")
    else:
        pipe, given = from_picture(name)
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")
    given = {**given, "num_inference_steps": 8, "output_type": "latent"}
    expected = run_pipeline_alone(pipe, 1, lambda one: pipe(generator=one, **given)[0])
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    found = fast(generator=torch.Generator().manual_seed(5), **given)[0]
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.std()), rtol=1e-4)
    windows: Any = mmspec.accelerate(pipe, FROZEN)
    assert bool(windows(**given, seed=0)[0].isfinite().all())
    assert windows.last_stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("noise", "steps"), covering([{"eta": 1.0}, {"churn": 1.0}], [1, 2, 3], strength=1)
)
def test_a_flow_with_given_noise_draws_none(noise: dict[str, Any], steps: int) -> None:
    """Churn draws none in the first step and in the last one, so none in two."""
    pipe = pipeline("flux")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    fast: Any = mmspec.accelerate(pipe, "asd")
    assert bool(draw(fast, "flux", seed=0, num_inference_steps=steps, **noise).isfinite().all())
    with pytest.raises(ValueError, match=r"give eta=1\.0"):
        draw(fast, "flux", seed=0, num_inference_steps=steps)


def test_a_motion_adapter_is_no_adapter() -> None:
    """AnimateDiff tells the prompt to every frame, three entries for each row of the network."""
    pipe = shared_pipeline("animatediff")

    def call(one: Any, generator: torch.Generator) -> torch.Tensor:
        return draw(one, "animatediff", 1, generator=generator, output_type="latent")

    expected = run_pipeline_alone(pipe, 1, lambda generator: call(pipe, generator))
    found = call(mmspec.accelerate(pipe, PLAIN), torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert bool(draw(mmspec.accelerate(pipe, FROZEN), "animatediff", seed=0).isfinite().all())


def test_networks_that_do_not_accept_other_rows_are_refused() -> None:
    hidream, given = build_pipeline("hidream")
    with pytest.raises(
        ValueError, match=r"pipe\.transformer does not accept other states.*lite=True"
    ):
        mmspec.accelerate(hidream, PLAIN)(num_inference_steps=STEPS, **given)
    with pytest.raises(
        ValueError, match=r"pipe\.unet does not accept other states.*expected 3, got 2"
    ):
        draw(mmspec.accelerate(shared_pipeline("pag"), PLAIN), "pag", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "recipe", "options"),
    [
        ("z-image", "taylorseer", {}),
        ("z-image", "speca", {"per_sample": False}),
        ("hidream", "taylorseer", {"lite": True}),
        ("lumina-2", "speca", {}),
    ],
)
def test_forecasts_know_other_names_of_time_and_layers(
    name: str, recipe: str, options: dict[str, Any]
) -> None:
    pipe, given = build_pipeline(name)
    fast: Any = mmspec.accelerate(pipe, recipe, **options)
    found = fast(num_inference_steps=8, **given)[0]
    assert bool(found.isfinite().all())
    assert fast.last_stats.num_accepted_draft_tokens > 0


def test_forecasts_of_ambiguous_lists_of_states_are_refused() -> None:
    pipe, given = build_pipeline("z-image")
    ways: list[tuple[str, dict[str, Any]]] = [("speca", {}), ("taylorseer", {"lite": True})]
    for recipe, options in ways:
        with pytest.raises(ValueError, match="takes a list of states"):
            mmspec.accelerate(pipe, recipe, **options)(num_inference_steps=3, **given)


@pytest.mark.parametrize("recipe", ["taylorseer", "first-block-cache"])
def test_both_experts_are_forecast(recipe: str) -> None:
    options: dict[str, Any] = (
        {"threshold": 1e3} if recipe == "first-block-cache" else {"interval": 4}
    )
    pipe, given = build_pipeline("wan-2.2")
    computed: list[int] = []
    shown: list[int] = []
    for place, expert in enumerate((pipe.transformer, pipe.transformer_2)):
        last = expert.blocks[-1].attn1.to_q
        last.register_forward_hook(lambda *_, place=place: computed.append(place))
        expert.register_forward_pre_hook(lambda *_, place=place: shown.append(place))
    fast: Any = mmspec.accelerate(pipe, recipe, **options)
    fast(num_inference_steps=20, generator=torch.Generator().manual_seed(0), **given)
    for place in range(2):
        assert 0 < computed.count(place) < 0.7 * shown.count(place)
    stats = fast.last_stats
    assert stats.target_calls + stats.num_accepted_draft_tokens == len(shown) == 40
    assert stats.target_calls == len(computed)
    assert not [name for name in ("forward",) if name in vars(pipe.transformer_2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "short", "options"),
    [("tea-cache", 8, {"threshold": 1e9}), ("mag-cache", 1, {"threshold": 1e9, "retention": 0.0})],
)
def test_a_call_too_short_for_one_expert_measures_neither(
    recipe: str, short: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pipe, given = build_pipeline("wan-2.2")
    fast: Any = mmspec.accelerate(pipe, recipe, **options)
    for _ in range(2):  # a list of one expert alone would be refused
        fast(num_inference_steps=short, seed=0, **given)
        assert fast.saved_parts == options
        assert not fast.last_stats.num_accepted_draft_tokens
    caplog.clear()
    fast(num_inference_steps=20, seed=0, **given)
    (measured,) = (value for name, value in fast.saved_parts.items() if name not in options)
    assert [len(measured), len(caplog.messages)] == [2, 1]
    assert str(measured) in caplog.text
    fast(num_inference_steps=20, seed=0, **given)
    assert fast.last_stats.num_accepted_draft_tokens > 10


@pytest.mark.parametrize("recipe", ["taylorseer", "speca", "first-block-cache"])
def test_nan_is_no_forecast(recipe: str) -> None:
    latents = torch.full((1, 16, 16), 3e38)  # finite; the network overflows on it
    options: dict[str, Any] = {"lite": True} if recipe == "taylorseer" else {}
    pipe = pipeline("flux")
    for broken in (False, True):
        if broken:
            pipe.transformer.proj_out.register_forward_hook(_nan_from_the_third)
        more: dict[str, Any] = {} if broken else {"latents": latents}
        fast = mmspec.accelerate(pipe, recipe, **options)
        with pytest.raises(ValueError, match=f"NaN or infinite in step {2 if broken else 0}"):
            draw(fast, "flux", 1, seed=0, **more)
        assert "forward" not in vars(pipe.transformer)


def _nan_from_the_third(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return output if module.calls < 3 else output * torch.nan


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param("taylorseer", {"lite": True}, marks=pytest.mark.exhaustive),
        pytest.param("taylorseer", {}, marks=pytest.mark.slow),
        pytest.param("speca", {}, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_network_is_forecast_as_it_was(recipe: str, options: dict[str, Any]) -> None:
    pipe = pipeline("dit")
    expected = draw(mmspec.accelerate(pipe, recipe, **options), "dit", seed=0)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    fast: Any = mmspec.accelerate(pipe, recipe, **options)
    torch.testing.assert_close(draw(fast, "dit", seed=0), expected)
    assert fast.last_stats.num_accepted_draft_tokens > 0


def test_blocks_that_the_cache_does_not_know_are_named() -> None:
    pipe, given = build_pipeline("lumina-2")
    fast = mmspec.accelerate(pipe, "first-block-cache")
    with pytest.raises(ValueError, match="does not know the Lumina2TransformerBlock of Lumina2Tr"):
        fast(num_inference_steps=3, **given)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "options", "match"),
    [
        ("asd", {"sampler": "stochastic"}, "LCMScheduler as configured has no counterpart"),
        ("asd", {}, r"a cache is enabled on pipe\.transformer"),
        ("taylorseer", {}, "has a cache of diffusers enabled; call disable_cache"),
    ],
)
def test_bad_input_is_refused_before_any_call_of_the_network(
    recipe: str, options: dict[str, Any], match: str
) -> None:
    pipe = pipeline("flux")
    if options:
        pipe.scheduler = diffusers.LCMScheduler()
    else:
        pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    calls: list[int] = []
    pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match=match):
        draw(mmspec.accelerate(pipe, recipe, **options), "flux", 1, seed=0)
    assert not calls
