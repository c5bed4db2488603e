"""Guidance of real pipelines: taken over as it is, or refused, and never guessed from one draw.

One picture is the dangerous case: a rule that depends on what the branches are, such as a norm, is
then a single number per step, which fits any one draw.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec.modalities.diffusion.guidance_fit import GuidanceFitter
from mmspec.modalities.diffusion.network_output import DenoiserOutput
from tests.covering import limited
from tests.modalities.sampling import (
    FROZEN,
    PLAIN,
    STEPS,
    check_rows,
    draw,
    run_pipeline_alone,
    shared_pipeline,
)
from tests.toys.embedded_pipelines import build_pipeline


@pytest.mark.parametrize("share", [0.7, 1.0])
@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_rescaled_guidance_of_one_picture_is_not_frozen(name: str, share: float) -> None:
    pipe = shared_pipeline(name)

    def call(one: Any, generator: torch.Generator) -> torch.Tensor:
        return draw(one, name, 1, generator=generator, guidance_rescale=share)

    expected = run_pipeline_alone(pipe, 1, lambda generator: call(pipe, generator))
    found = call(mmspec.accelerate(pipe, PLAIN), torch.Generator().manual_seed(5))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "more"),
    limited(
        [
            ("cogvideo", {"use_dynamic_cfg": True}),  # other weights in every step: two rehearsals
            ("cogvideo", {}),
            ("hunyuan-image", {"num_inference_steps": 2}),  # before its guider begins to project
            ("lumina-2", {"cfg_normalization": False}),
            ("lumina-2", {}),  # the norm of the positive branch
            ("qwen-image", {}),
            ("wan-2.1", {}),
            ("qwen-image", {"height": 64, "width": 64}),
            ("wan-2.2", {"guidance_scale": 3.0, "guidance_scale_2": 5.0}),  # two networks
            ("wan-2.2-tokens", {}),  # a timestep per token
            ("z-image", {}),  # a list of states
            ("z-image", {"cfg_truncation": 0.5}),  # one branch in the last steps, as with
            ("hunyuan-video-1.5", {}),  # a guider that stops half-way
        ],
        8,
    ),
)
def test_known_rules_are_the_pipelines_own(name: str, more: dict[str, Any]) -> None:
    """From the state of the generator on: a second rehearsal must not draw from it again."""
    pipe, given = build_pipeline(name)
    given = {"num_inference_steps": STEPS, **given, **more}
    expected = run_pipeline_alone(pipe, 1, lambda one: pipe(generator=one, **given)[0])
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    found = fast(generator=torch.Generator().manual_seed(5), **given)[0]
    scale = expected.std().item()
    torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=1e-4)
    assert fast.last_stats.target_calls == given["num_inference_steps"]


@pytest.mark.parametrize(
    ("name", "more", "cause"),
    [
        ("hunyuan-image", {}, r"switch off pipe\.guider"),
        (
            "prx-pixel",
            {},
            "not supported",
        ),  # its scheduler is given (state - output) / t
        ("prx-pixel", {"guidance_scale": 1.0}, "not supported"),
        ("z-image", {"cfg_normalization": 1.0}, "limited by a norm.*cfg_normalization=1.0"),
        ("z-image", {"cfg_normalization": 1e3}, "limited by a norm"),  # never reached by chance
    ],
)
def test_guidance_that_depends_on_its_branches_is_refused(
    name: str, more: dict[str, Any], cause: str
) -> None:
    pipe, given = build_pipeline(name)
    with pytest.raises(ValueError, match=rf"rule that is.*{cause}.*speca or taylorseer"):
        mmspec.accelerate(pipe, PLAIN)(num_inference_steps=STEPS, **{**given, **more})


@pytest.mark.parametrize("name", ["wan-2.2", "wan-2.2-tokens", "z-image", "hunyuan-video-1.5"])
def test_states_of_any_steps_are_read_at_once(name: str) -> None:
    """Those of two experts too, or of steps with one branch and with two."""
    pipe, given = build_pipeline(name)
    check_rows(pipe, given | ({"cfg_truncation": 0.5} if name == "z-image" else {}))


def test_each_expert_sees_its_own_part_of_the_chain() -> None:
    """A window may lie across the boundary: every state is shown to the expert of its step."""
    pipe, given = build_pipeline("wan-2.2")
    boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
    seen: dict[str, list[float]] = {"transformer": [], "transformer_2": []}
    for name, times in seen.items():
        getattr(pipe, name).register_forward_pre_hook(
            lambda module, args, kwargs, times=times: times.extend(kwargs["timestep"].tolist()),
            with_kwargs=True,
        )
    fast: Any = mmspec.accelerate(pipe, FROZEN)
    fast(num_inference_steps=2 * STEPS, seed=0, **given)
    assert min(seen["transformer"]) >= boundary > max(seen["transformer_2"])
    assert fast.last_stats.num_draft_tokens > 0
    probed = 2 * 2 * 2  # two forwards of two rows of each expert: form, and no influence of others
    assert sum(map(len, seen.values())) == fast.last_stats.network_rows + probed


def test_a_ratio_that_fits_one_draw_does_not_fit_two() -> None:
    """A norm of one picture, in steps whose other weights are a schedule."""
    fitter = GuidanceFitter({})
    for step in range(3):
        negative, positive = torch.randn(2, 1, 4, 8, 8)
        guided = negative + (step + 1) * (positive - negative)
        fitter.add(step, [negative, positive], guided * positive.norm() / guided.norm())
    assert not fitter.is_sure
    negative, positive = torch.randn(2, 1, 4, 8, 8)
    guided = positive * (positive.norm() / negative.norm())
    with pytest.raises(ValueError, match="different for other outputs of the same step"):
        fitter.add(0, [negative, positive], guided)


def test_numbers_of_a_rehearsal_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A latent drawn with a small seed is no output of the stand-in, and no draw comes twice."""
    drawn: list[torch.Tensor] = []
    plain = DenoiserOutput.random

    def watched(self: DenoiserOutput, call: Any, seed: int) -> list[torch.Tensor]:
        drawn.extend(plain(self, call, seed))
        return drawn[-1:]

    monkeypatch.setattr(DenoiserOutput, "random", watched)
    fast: Any = mmspec.accelerate(shared_pipeline("flux"), PLAIN)
    more = {"true_cfg_scale": 3.0, "negative_prompt": "not a dot"}  # two network calls a step
    draw(fast, "flux", 1, generator=torch.Generator().manual_seed(0), **more)
    assert len(drawn) == 2 * STEPS
    rows = torch.stack([one.flatten() for one in drawn])
    latents = [
        torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(seed))
        for seed in range(64)
    ]
    every = torch.cat((rows, torch.stack(latents)))
    assert (torch.corrcoef(every)[: len(rows)] > 0.9).sum() == len(rows)  # with itself alone


def test_a_latent_of_a_small_seed_is_not_taken_for_an_output() -> None:
    """Its scheduler is given (state - output) / t, which is nothing where the two are equal."""
    pipe, given = build_pipeline("prx-pixel")
    fast: Any = mmspec.accelerate(pipe, PLAIN)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        with pytest.raises(ValueError, match="rule that is not supported"):
            fast(num_inference_steps=STEPS, generator=generator, **given)
