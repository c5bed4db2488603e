"""Pipelines through the loop against pipelines alone.

Both draw the same noise: the chain's is replayed to the scheduler. Tolerance 1e-5 on pixels in
[0, 1], or latents of order 1, after six steps in float32: our tables and sums are rounded elsewhere
than the scheduler's.
"""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.modalities.diffusion.network import PipelineDenoiser, count_images
from mmspec.recipe import Recipe
from mmspec.verifiers.tolerance_window import ToleranceWindow
from tests.covering import covering, exhaustive, limited
from tests.modalities.sampling import (
    COPIES,
    FROZEN,
    PLAIN,
    STEPS,
    draw,
    run_pipeline_alone,
    shared_pipeline,
)
from tests.toys.embedded_pipelines import build_pipeline
from tests.toys.pipelines import PROMPTS, build_request, pipeline


@pytest.mark.parametrize(
    ("name", "more"),
    limited(
        [
            ("ddpm", {}),
            ("ddim", {"eta": 1.0}),
            pytest.param("ddim", {"eta": 0.5}, marks=pytest.mark.slow),
            ("dit", {"guidance_scale": 4.0}),
            ("dit", {"guidance_scale": 1.0}),
            ("sd", {"guidance_scale": 7.123456}),
            ("sd", {"guidance_scale": 1.0}),
            ("sd", {"guidance_rescale": 0.6}),
            ("sd", {"num_images_per_prompt": 2, "negative_prompt": ["x", "y"]}),
            pytest.param("sdxl", {}, marks=pytest.mark.slow),
            ("sd3", {}),
            (
                "sd3",
                {"skip_guidance_layers": [0], "skip_layer_guidance_stop": 0.6},
            ),  # one more call
            ("flux", {}),
            ("flux", {"true_cfg_scale": 3.0, "negative_prompt": "not a dot"}),
            pytest.param("pixart", {}, marks=pytest.mark.slow),
            pytest.param("ltx", {"guidance_rescale": 0.3}, marks=pytest.mark.slow),
        ],
        8,
    ),
)
def test_plain_sampling_is_the_pipelines_own(name: str, more: dict[str, Any]) -> None:
    pipe = shared_pipeline(name)
    images = 2 * more.get("num_images_per_prompt", 1)
    expected = run_pipeline_alone(pipe, images, lambda one: draw(pipe, name, generator=one, **more))
    fast = mmspec.accelerate(pipe, PLAIN)
    found = draw(fast, name, generator=torch.Generator().manual_seed(5), **more)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert fast.last_stats is not None
    assert fast.last_stats.target_calls == STEPS


@pytest.mark.parametrize(
    ("name", "recipe"), covering(["ddpm", "sd", "flux"], [COPIES, FROZEN], strength=1)
)
def test_a_window_of_one_is_plain_sampling_bit_for_bit(name: str, recipe: Recipe) -> None:
    pipe = shared_pipeline(name)
    plain = draw(mmspec.accelerate(pipe, PLAIN), name, seed=1)
    assert torch.equal(draw(mmspec.accelerate(pipe, recipe, window=1), name, seed=1), plain)


@pytest.mark.parametrize(("name", "width"), [("ddpm", 1), ("sd", 2), ("dit", 2)])
def test_copies_are_plain_sampling_bit_for_bit(name: str, width: int) -> None:
    """With one state per network call, so that batching cannot change the rounding."""
    pipe = shared_pipeline(name)
    plain = draw(mmspec.accelerate(pipe, PLAIN, max_rows=width), name, seed=1)
    fast: Any = mmspec.accelerate(pipe, COPIES, max_rows=width)
    assert torch.equal(draw(fast, name, seed=1), plain)
    assert fast.last_stats.num_accepted_draft_tokens > 0  # the refreshed root is a copy
    assert torch.equal(draw(mmspec.accelerate(pipe, PLAIN), name, seed=2), plain) is False


@pytest.mark.parametrize(
    ("name", "recipe"), limited(covering(("sd", "dit", "flux"), (FROZEN, COPIES), strength=1), 2)
)
def test_a_batch_is_its_pictures_alone(name: str, recipe: Recipe) -> None:
    """Within 1e-3: guided random networks and reflections amplify the rounding of a batch."""
    fast: Any = mmspec.accelerate(shared_pipeline(name), recipe)
    together = draw(fast, name, 3, seed=3, num_inference_steps=8)
    first = next(iter(build_request(name)))
    for row in range(3):
        one = {first: build_request(name, 3)[first][row : row + 1]}
        found = draw(fast, name, 1, seed=3, row_ids=[row], num_inference_steps=8, **one)
        torch.testing.assert_close(found[0], together[row], atol=1e-3, rtol=1e-2)


def test_pictures_go_at_their_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some calls have images at different steps, and all images are finished."""
    seen: list[dict[int, int]] = []
    plain = PipelineDenoiser.predict

    def watched(self: PipelineDenoiser, states: Tensor, step: Tensor, row: Tensor) -> Any:
        pairs = list(zip(row.tolist(), step.tolist(), strict=True))
        seen.append({r: min(s for q, s in pairs if q == r) for r in set(row.tolist())})
        return plain(self, states, step, row)

    monkeypatch.setattr(PipelineDenoiser, "predict", watched)
    fast: Any = mmspec.accelerate(shared_pipeline("dit"), FROZEN)
    draw(fast, "dit", 3, seed=0, num_inference_steps=20)
    assert any(len(set(steps.values())) > 1 for steps in seen)
    assert fast.last_stats.num_new_tokens == 3 * 20


def test_the_count_is_honest() -> None:
    pipe = pipeline("sd")
    rows: list[int] = []
    pipe.unet.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    fast: Any = mmspec.accelerate(pipe, "asd", window=8)
    out = fast(PROMPTS[0], num_inference_steps=30, output_type="np", seed=0)
    stats = out.stats
    assert stats is fast.last_stats
    assert stats.exact
    assert stats.num_new_tokens == 30
    assert stats.mean_acceptance_length > 1
    assert [rows.pop(0), rows.pop(0)] == [3, 3]  # once: equal rows, and rows with other neighbours
    assert len(rows) == stats.target_calls
    assert sum(rows) == stats.network_rows
    rows.clear()
    rounds: list[Any] = []
    fast(PROMPTS[0], num_inference_steps=30, output_type="np", seed=0, on_round=rounds.append)
    assert sum(len(one.tokens[0]) for one in rounds) == 30
    assert sum(one.calls for one in rounds) == stats.target_calls
    assert sum(rows) == stats.network_rows


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_half_precision_stays_in_the_network(name: str) -> None:
    """States and decisions are float32; the pipeline gets its latents back in its own dtype."""
    pipe = pipeline(name).to(torch.bfloat16)
    fast: Any = mmspec.accelerate(pipe, FROZEN)
    latents = draw(fast, name, seed=0, output_type="latent")
    assert latents.dtype == torch.bfloat16
    assert torch.isfinite(latents).all()
    assert fast.last_stats.num_accepted_draft_tokens > 0


def test_max_rows_bounds_the_network() -> None:
    pipe = pipeline("sd")
    fast: Any = mmspec.accelerate(pipe, FROZEN, max_rows=4)
    at_once: Any = mmspec.accelerate(pipe, FROZEN)
    whole = draw(at_once, "sd", 3, seed=0)
    rows: list[int] = []
    pipe.unet.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    torch.testing.assert_close(draw(fast, "sd", 3, seed=0), whole, atol=1e-5, rtol=1e-4)
    assert max(rows) == 4
    stats = fast.last_stats
    assert stats.target_calls == at_once.last_stats.target_calls < len(rows)  # split ones once
    assert stats.network_rows == at_once.last_stats.network_rows


def test_a_seed_is_a_picture() -> None:
    fast: Any = mmspec.accelerate(shared_pipeline("sd"), PLAIN)
    state = torch.get_rng_state()
    one, again, other = (draw(fast, "sd", seed=seed) for seed in (0, np.int64(0), 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)  # a seed needs nothing of the global noise
    latents = torch.randn(2, 4, 8, 8)
    given = [draw(fast, "sd", seed=seed, latents=latents) for seed in (0, 1)]
    assert not torch.equal(*given)
    assert not torch.equal(given[0], one)


def test_a_picture_depends_on_its_own_generator_alone() -> None:
    fast: Any = mmspec.accelerate(shared_pipeline("sd"), PLAIN)

    def generators(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    prompt = [PROMPTS[0]] * 2
    both = draw(fast, "sd", generator=generators(7, 8), prompt=prompt)
    swapped = draw(fast, "sd", generator=generators(8, 7), prompt=prompt)
    torch.testing.assert_close(swapped.flip(0), both, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(both[0], both[1], atol=1e-2)


def test_outputs_are_the_pipelines_own() -> None:
    pipe = shared_pipeline("sd")
    fast: Any = mmspec.accelerate(pipe, "asd", window=2)
    settings: dict[str, Any] = {"num_inference_steps": 4, "seed": 0}
    out = fast(PROMPTS[0], **settings)
    assert type(out).__name__ == "StableDiffusionPipelineOutput"
    assert out.images[0].size == (8, 8)
    latent = fast(PROMPTS[0], output_type="latent", return_dict=False, **settings)
    assert isinstance(latent, tuple)
    assert latent[0].shape == (1, 4, 8, 8)


def test_nothing_is_written_onto_the_pipeline() -> None:
    pipe = pipeline("sd")
    before = {name: id(value) for name, value in pipe.__dict__.items()}
    config, scheduler = dict(pipe.config), dict(pipe.scheduler.__dict__)
    unet = set(pipe.unet.__dict__)
    with mmspec.accelerate(pipe, "asd", window=3) as fast:
        draw(fast, "sd", seed=0)
        with pytest.raises(ValueError, match="window"):
            draw(fast, "sd", seed=0, num_inference_steps=2)
    assert {name: id(value) for name, value in pipe.__dict__.items()} == before
    assert dict(pipe.config) == config
    assert {k: id(v) for k, v in pipe.scheduler.__dict__.items()} == {
        k: id(v) for k, v in scheduler.items()
    }
    assert set(pipe.unet.__dict__) == unet


def test_disabled_is_the_pipeline_itself() -> None:
    pipe = pipeline("ddpm")
    fast: Any = mmspec.accelerate(pipe, "asd", window=3)
    fast.disable()
    found, expected = (
        draw(one, "ddpm", generator=torch.Generator().manual_seed(0)) for one in (fast, pipe)
    )
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="seed is an argument of mmspec"):
        draw(fast, "ddpm", seed=0)


def test_offloading_hooks_fire() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate, for offloading, is missing")
    pipe = pipeline("sd")
    plain = draw(mmspec.accelerate(pipe, PLAIN), "sd", seed=0)

    class Counting(accelerate.hooks.ModelHook):  # type: ignore[misc, name-defined]
        calls = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    hook = Counting()
    accelerate.hooks.add_hook_to_module(pipe.unet, hook)
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    assert torch.equal(draw(fast, "sd", seed=0), plain)
    assert hook.calls == STEPS + 2  # and twice to learn the form of the output
    accelerate.cpu_offload(pipe.unet, torch.device("cpu"))  # weights live on the meta device now
    assert torch.equal(draw(mmspec.accelerate(pipe, PLAIN), "sd", seed=0), plain)


@pytest.mark.gpu
def test_model_offload_on_a_device() -> None:
    pipe = pipeline("sd")
    pipe.enable_model_cpu_offload()
    fast: Any = mmspec.accelerate(pipe, FROZEN)
    once, twice = (draw(fast, "sd", seed=0) for _ in range(2))
    assert torch.equal(once, twice)
    assert {weight.device.type for weight in pipe.unet.parameters()} == {"cpu"}  # and away again


def test_a_draft_pipeline_drafts() -> None:
    """Drafts with the target's weights are all accepted, others in part; both are exact."""
    pipe, other = shared_pipeline("dit"), pipeline("dit", seed=9)
    calls = {}
    for name, small in (("same", pipe), ("other", other)):
        fast: Any = mmspec.accelerate(pipe, "accelerated-diffusion", drafter=small, window=4)
        draw(fast, "dit", seed=0, num_inference_steps=13)
        calls[name] = fast.last_stats
    assert calls["same"].draft_acceptance_rate == 1
    assert calls["same"].target_calls == 4  # 4 + 4 + 4 + 1 states
    assert calls["other"].draft_acceptance_rate < 0.9


def test_a_deterministic_scheduler_is_made_random_by_eta() -> None:
    pipe = pipeline("flux")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    assert torch.isfinite(draw(fast, "flux", seed=0, eta=1.0)).all()
    assert torch.isfinite(draw(fast, "flux", seed=0, churn=0.7)).all()
    with pytest.raises(ValueError, match=r"give eta=1\.0"):
        draw(fast, "flux", seed=0)
    with pytest.raises(ValueError, match=r"eta='1' must be a number of at least 0; give one"):
        draw(fast, "flux", seed=0, eta="1")


@pytest.mark.parametrize(
    ("name", "scheduler"),
    limited(
        [
            ("ddim", diffusers.DDIMScheduler()),
            ("sd", diffusers.EulerDiscreteScheduler(timestep_spacing="trailing")),
            ("sd", diffusers.DPMSolverMultistepScheduler(solver_order=1)),
            ("flux", diffusers.FlowMatchEulerDiscreteScheduler()),
        ],
        2,
    ),
    ids=["ddim", "euler", "dpm", "flow"],
)
def test_tolerances_take_deterministic_chains(name: str, scheduler: Any) -> None:
    """Without tolerance the result is that of the pipeline; with it calls are saved."""
    pipe, calls = pipeline(name), []
    pipe.scheduler = scheduler
    expected = draw(pipe, name, generator=torch.Generator().manual_seed(5))
    assert expected.std() > 0.05
    for verifier in (ToleranceWindow(0.0), ToleranceWindow(1e3)):
        fast: Any = mmspec.accelerate(pipe, "paradigms", verifier=verifier, window=4)
        found = draw(fast, name, generator=torch.Generator().manual_seed(5))
        same = torch.allclose(found, expected, atol=2e-5, rtol=1e-4)
        assert same is verifier.lossless
        calls.append(fast.last_stats.target_calls)
    assert calls[1] < calls[0] == STEPS
    with pytest.raises(ValueError, match=r"an exact recipe needs.*paradigms, speca or taylorseer"):
        draw(mmspec.accelerate(pipe, "asd"), name, seed=0)


@pytest.mark.parametrize("name", limited(["dit", "flux"], 1))
@pytest.mark.parametrize("recipe", ["taylorseer", "speca"])
def test_forecasts_leave_the_loop_to_the_pipeline(name: str, recipe: str) -> None:
    """Neutral settings give the pipeline's image, others do not; the network is restored."""
    pipe, steps = pipeline(name), 8
    torch.manual_seed(0)  # the steps of these two pipelines draw from the global generator
    plain = draw(pipe, name, generator=torch.Generator().manual_seed(0), num_inference_steps=steps)
    before = set(pipe.transformer.__dict__)  # contexts of caches, the pipeline's own, included
    neutral: dict[str, dict[str, Any]] = {
        "taylorseer": {"interval": 1},
        "speca": {"base": -1.0, "floor": -1.0, "least": 0},
    }
    same: Any = mmspec.accelerate(pipe, recipe, **neutral[recipe])
    torch.testing.assert_close(draw(same, name, seed=0, num_inference_steps=steps), plain)
    fast: Any = mmspec.accelerate(pipe, recipe)
    lossy = draw(fast, name, seed=0, num_inference_steps=steps)
    assert not torch.equal(lossy, plain)
    assert torch.equal(draw(fast, name, seed=np.int64(0), num_inference_steps=steps), lossy)
    assert fast.last_stats.unverified_tokens > 0
    assert set(pipe.transformer.__dict__) == before
    with pytest.raises(ValueError, match="unknown keyword row_ids"):
        draw(fast, name, row_ids=[0, 1])
    with pytest.raises(ValueError, match="drafts no window"):
        mmspec.accelerate(pipe, recipe, window=3)


@pytest.mark.parametrize("recipe", mmspec.recipes.names("latents"))
def test_every_recipe_of_latents_runs(recipe: str) -> None:
    name = "sd" if recipe == "deep-cache" else "dit"  # for U-Nets
    pipe = shared_pipeline(name)
    takes = mmspec.recipes.get(recipe).takes_drafter
    fast: Any = mmspec.accelerate(pipe, recipe, drafter=pipe if takes else None)
    assert torch.isfinite(draw(fast, name, seed=0, num_inference_steps=12)).all()
    assert fast.last_stats is not None


@pytest.mark.parametrize(
    "recipe",
    exhaustive(
        [name for name in mmspec.recipes.names("latents") if mmspec.recipes.get(name).exact],
        ("accelerated-diffusion-secant", "asd", "asd-tree", "block-diffusion"),
    ),
)
def test_a_learned_variance_is_sampled_or_refused(recipe: str) -> None:
    pipe = shared_pipeline("learned")
    takes = mmspec.recipes.get(recipe).takes_drafter
    fast: Any = mmspec.accelerate(pipe, recipe, drafter=pipe if takes else None)
    if recipe in ("asd-tree", "block-diffusion"):
        with pytest.raises(
            ValueError, match=r'the network predicts it.*variance_type="fixed_small"'
        ):
            draw(fast, "ddpm", seed=0, num_inference_steps=30)
        return
    found = draw(fast, "ddpm", seed=0, num_inference_steps=30)
    assert bool(torch.isfinite(found).all())
    assert fast.last_stats.num_draft_tokens > 0


def test_pictures_are_counted() -> None:
    assert count_images({"prompt": "one", "num_images_per_prompt": 3}) == 3
    assert count_images({"prompt": ["a", "b"], "num_videos_per_prompt": 2}) == 4
    assert count_images({"class_labels": [1, 2, 3], "prompt": None}) == 3
    assert count_images({"batch_size": 5}) == 5
    assert count_images({}) is None
    assert count_images({"prompt_embeds": object()}) is None  # for the pipeline to refuse


def test_words_for_more_pictures_than_there_are_have_a_name() -> None:
    pipe, given = build_pipeline("wan-2.2")
    given["negative_prompt_embeds"] = given["negative_prompt_embeds"].repeat(3, 1, 1)
    with pytest.raises(ValueError, match="3 rows of encoder_hidden_states for 1 of states"):
        mmspec.accelerate(pipe, PLAIN)(num_inference_steps=3, **given)


@pytest.mark.parametrize("name", ["prompt", "class_labels"])
def test_a_call_for_no_picture_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=\[\] requests no image; give"):
        count_images({name: []})


@pytest.mark.parametrize("recipe", ["asd", "speca"])
@pytest.mark.parametrize("count", [{"batch_size": 0}, {"num_inference_steps": -3}])
def test_counts_below_one_are_refused_by_name(recipe: str, count: dict[str, int]) -> None:
    name, value = next(iter(count.items()))
    fast = mmspec.accelerate(pipeline("ddpm"), recipe)
    with pytest.raises(ValueError, match=rf"{name}={value} must be a whole number of at least 1"):
        fast(**{"num_inference_steps": 2, **count})


class _TensorScale(torch.nn.Module):
    """A linear layer whose inputs are rounded to 8 bits by one scale for the whole tensor."""

    def __init__(self, linear: torch.nn.Linear, per_row: bool) -> None:
        super().__init__()
        self.linear, self.per_row = linear, per_row

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().amax(-1, keepdim=True) if self.per_row else x.abs().amax()
        scale = size.clamp_min(1e-12) / 127
        output: Tensor = self.linear((x / scale).round() * scale)
        return output


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("name", ["sd", "dit"])
def test_rows_that_depend_on_each_other_are_refused(name: str, per_row: bool) -> None:
    """As activations quantized per tensor are; a recipe that keeps the loop takes them."""
    pipe = pipeline(name)
    network = pipe.unet if name == "sd" else pipe.transformer
    for part in list(network.modules()):
        for key, one in list(part.named_children()):
            if type(one) is torch.nn.Linear and key.startswith(("to_", "0", "proj", "2")):
                setattr(part, key, _TensorScale(one, per_row))
    if per_row:
        assert draw(mmspec.accelerate(pipe, FROZEN), name, seed=0).std() > 0
        return
    with pytest.raises(ValueError, match=r"different for a state when other states.*PerRow\(\)"):
        draw(mmspec.accelerate(pipe, FROZEN), name, seed=0)
    forecast = mmspec.accelerate(pipe, "taylorseer", interval=1, lite=True)
    assert draw(forecast, name, seed=0).std() > 0
