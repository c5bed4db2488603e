"""Features of a pipeline's loop that tracing detects and refuses, and other user errors."""

from __future__ import annotations

import functools
from typing import Any

import diffusers
import pytest
import torch

import mmspec
from mmspec.decode import BrokenLogits
from mmspec.modalities.diffusion.call_recorder import Stages, StubCall
from mmspec.recipe import Recipe
from tests import toys
from tests.modalities.sampling import FROZEN, PLAIN, STEPS, draw, shared_pipeline
from tests.toys.pipelines import UNET, pipeline


class Bad:
    """Mistakes, each with its expected message."""

    @staticmethod
    def solver() -> None:
        pipe = pipeline("sd")
        pipe.scheduler = diffusers.DPMSolverMultistepScheduler()
        mmspec.accelerate(pipe, "asd")

    @staticmethod
    def unknown_scheduler() -> None:
        pipe = pipeline("sd")
        pipe.scheduler = diffusers.LCMScheduler()
        mmspec.accelerate(pipe, "asd")

    @staticmethod
    def ddim() -> None:
        draw(mmspec.accelerate(shared_pipeline("ddim"), "asd", window=2), "ddim", seed=0)

    @staticmethod
    def token_recipe() -> None:
        mmspec.accelerate(shared_pipeline("sd"), "prompt-lookup")

    @staticmethod
    def latent_recipe() -> None:
        mmspec.accelerate(toys.model("llama"), "asd")

    @staticmethod
    def long_window() -> None:
        draw(mmspec.accelerate(shared_pipeline("sd"), "asd", window=STEPS + 1), "sd")

    @staticmethod
    def both_shapes() -> None:
        mmspec.accelerate(shared_pipeline("sd"), "asd", window=3, tree=[2, 1])

    @staticmethod
    def unknown_part() -> None:
        mmspec.accelerate(shared_pipeline("sd"), "asd", windw=3)

    @staticmethod
    def compressor() -> None:
        mmspec.accelerate(shared_pipeline("sd"), "asd", compressor="average-pool")

    @staticmethod
    def unknown_argument() -> None:
        draw(mmspec.accelerate(shared_pipeline("sd"), PLAIN), "sd", guidance_scal=3.0)

    @staticmethod
    def twice() -> None:
        mmspec.accelerate(shared_pipeline("sd"), PLAIN)("a", prompt="b")

    @staticmethod
    def two_noises() -> None:
        fast = mmspec.accelerate(shared_pipeline("sd"), PLAIN)
        draw(fast, "sd", seed=0, generator=torch.Generator())

    @staticmethod
    def no_network() -> None:
        pipe = pipeline("sd")
        pipe.unet = None
        mmspec.accelerate(pipe, "asd")

    @staticmethod
    def no_drafter() -> None:
        mmspec.accelerate(shared_pipeline("sd"), "accelerated-diffusion")

    @staticmethod
    def needless_drafter() -> None:
        mmspec.accelerate(shared_pipeline("sd"), "asd", drafter=shared_pipeline("sd"))

    @staticmethod
    def no_pipeline() -> None:
        mmspec.accelerate(
            shared_pipeline("sd"), "accelerated-diffusion", drafter=shared_pipeline("sd").unet
        )

    @staticmethod
    def other_arguments() -> None:
        mmspec.accelerate(
            shared_pipeline("sd"), "accelerated-diffusion", drafter=shared_pipeline("dit")
        )

    @staticmethod
    def other_size() -> None:
        blocks = (("DownBlock2D",) * 2, ("UpBlock2D",) * 2)
        sizes = {
            **UNET,
            "sample_size": 4,
            "down_block_types": blocks[0],
            "up_block_types": blocks[1],
        }
        small = diffusers.DDPMPipeline(diffusers.UNet2DModel(**sizes), diffusers.DDPMScheduler())
        fast = mmspec.accelerate(
            shared_pipeline("ddpm"), "accelerated-diffusion", drafter=small, window=2
        )
        draw(fast, "ddpm")

    @staticmethod
    def small_max_rows() -> None:
        draw(mmspec.accelerate(shared_pipeline("sd"), PLAIN, max_rows=1), "sd")

    @staticmethod
    def half_way() -> None:
        draw(mmspec.accelerate(shared_pipeline("sdxl"), PLAIN), "sdxl", denoising_end=0.5)

    @staticmethod
    def cached() -> None:
        pipe = pipeline("flux")
        pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig())
        mmspec.accelerate(pipe, "asd")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (Bad.solver, "deterministic steps.*sde-dpmsolver"),
        (Bad.unknown_scheduler, "does not support LCMScheduler"),
        (Bad.ddim, "give eta=1.0"),
        (Bad.token_recipe, "decodes tokens.*StableDiffusionPipeline gives latents.*asd"),
        (Bad.latent_recipe, "'asd' decodes latents.*recipes for it:.*prompt-lookup"),
        (Bad.long_window, f"window of {STEPS + 1} states is longer than the chain"),
        (Bad.both_shapes, "give one of them"),
        (Bad.unknown_part, "unknown keyword windw.*did you mean 'window'"),
        (Bad.compressor, "unknown keyword compressor"),
        (Bad.unknown_argument, "did you mean 'guidance_scale'"),
        (Bad.twice, "prompt is given by position and by name"),
        (Bad.two_noises, "give one of them"),
        (Bad.no_network, "no denoising network"),
        (Bad.no_drafter, "needs a draft pipeline"),
        (Bad.needless_drafter, "takes no draft model"),
        (Bad.no_pipeline, "needs a draft pipeline, and drafter= is a UNet2DConditionModel"),
        (Bad.other_arguments, "the draft pipeline needs class_labels"),
        (Bad.other_size, "draft pipeline of their size"),
        (Bad.small_max_rows, "max_rows=1 does not hold one state"),
        (Bad.half_way, "denoising_end"),
        (Bad.cached, "disable_cache"),
    ],
)
def test_a_mistake_is_one_clear_error(mistake: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mistake()


@pytest.mark.parametrize("recipe", [PLAIN, FROZEN], ids=["plain", "frozen"])
def test_broken_latents_name_the_round(recipe: Recipe) -> None:
    latents = torch.zeros(2, 4, 8, 8)
    latents[1] = 3e38  # finite; the network overflows on it
    with pytest.raises(BrokenLogits, match=r"NaN or infinite in round 0 \(row 1"):
        draw(mmspec.accelerate(shared_pipeline("sd"), recipe), "sd", latents=latents)


@pytest.mark.parametrize("recipe", ["asd", "speca"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_latents_that_are_no_numbers_are_named(recipe: str, value: float) -> None:
    latents = torch.zeros(2, 4, 8, 8)
    latents[1, 0, 0, 0] = value
    with pytest.raises(
        ValueError, match=r"latents=float32 \(2, 4, 8, 8\) must be a tensor of finite"
    ):
        draw(mmspec.accelerate(shared_pipeline("sd"), recipe), "sd", latents=latents)


def test_stages_depend_on_network_calls_and_not_on_states() -> None:
    states, words = torch.zeros(2, 4), torch.zeros(2, 3)
    stages = Stages({}, [])

    def make_calls(*rows: int) -> list[StubCall]:
        return [StubCall("unet", (states[:n], words[:n]), {}, [states[:n]]) for n in rows]

    both, one = stages.find_stage(0, make_calls(2)), stages.find_stage(1, make_calls(1))
    assert (
        stages.find_stage(2, make_calls(2)) is both is not one
    )  # the guidance of step 1 has one branch
    assert stages.find_stage(3, make_calls(1, 1)) is not both  # and of step 3 a call for each
    assert stages.find_stage(0, make_calls(2)) is both  # in a second rehearsal
    with pytest.raises(ValueError, match=r"depend on the states.*speca and taylorseer"):
        stages.find_stage(0, make_calls(1))


def test_a_step_without_the_network_is_refused() -> None:
    pipe = pipeline("sd")

    class Repeating(type(pipe)):  # type: ignore[misc]
        @functools.wraps(type(pipe).__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            step = self.scheduler.step

            def twice(output: Any, t: Any, sample: Any, **more: Any) -> Any:
                made = step(output, t, sample, **more)
                return (
                    made if t < 500 else step(output, self.scheduler.timesteps[1], sample, **more)
                )

            self.scheduler.step = twice
            return super().__call__(*args, **kwargs)

    pipe.__class__ = Repeating
    with pytest.raises(
        ValueError, match=r"does not call pipe\.unet in step 1.*speca or taylorseer"
    ):
        draw(mmspec.accelerate(pipe, PLAIN), "sd", num_inference_steps=3)
