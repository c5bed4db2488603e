"""The bundled U-Net: training from a seed, its text encoder, and correct facts on prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny, DiffusionPipeline, StableDiffusionPipeline

import mmspec
from mmspec import zoo
from mmspec.modalities.diffusion.checkpoints import load
from mmspec.zoo import train
from mmspec.zoo.prompts import prompts
from mmspec.zoo.scene_parser import score_picture
from tools.zoo.diffusion import models, unet
from tools.zoo.diffusion.evaluate import MAX_SEQUENCE_LENGTH, generate_images

NAME = "diffusion-unet"
SWAPPED: Any = {"sampler": "stochastic"}
TEXTS = ["a large red circle in the center", ""]


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    return zoo.load(NAME)


def test_it_decodes_the_latents_of_its_teacher(pipeline: Any) -> None:
    mine, theirs = pipeline.vae.state_dict(), zoo.vae(unet.TEACHER).state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in mine.items())
    assert pipeline.vae.config.scaling_factor == zoo.vae(unet.TEACHER).config.scaling_factor


def test_prompts_are_encoded_as_in_training(pipeline: Any) -> None:
    trained = unet.encode_padded(pipeline.text_encoder, pipeline.tokenizer, TEXTS)
    used, _ = pipeline.encode_prompt(TEXTS, "cpu", 1, False)
    assert trained.states.shape == (2, MAX_SEQUENCE_LENGTH, models.TEXT_WIDTH)
    assert torch.equal(trained.states, used)


def test_every_cell_has_a_state_on_the_lowest_level() -> None:
    network: Any = unet.unet((8, 8, 16))
    shapes: list[tuple[int, ...]] = []
    network.mid_block.register_forward_hook(lambda _, args, out: shapes.append(tuple(out.shape)))
    states = torch.zeros(1, MAX_SEQUENCE_LENGTH, models.TEXT_WIDTH)
    network(torch.zeros(1, 4, 12, 12), 5, encoder_hidden_states=states)
    assert shapes == [(1, 16, 3, 3)]


@pytest.mark.exhaustive
def test_training_writes_a_pipeline_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unet, "BATCH", 8)
    stages: list[str] = []
    report = train(NAME, tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    assert list(dict.fromkeys(stages)) == ["read", "encode", "draw"]
    assert {"facts_in_28_steps", "facts_in_50_steps", "parameters"} <= report.keys()
    for loaded in (DiffusionPipeline.from_pretrained(tmp_path), load(zoo.info(NAME), tmp_path)):
        assert isinstance(loaded, StableDiffusionPipeline)
        assert isinstance(loaded.vae, AutoencoderTiny)
        assert generate_images(loaded, TEXTS, steps=2).shape == (2, 48, 48, 3)


@pytest.mark.exhaustive
def test_the_student_learns_the_predictions_of_its_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss falls within few steps."""
    monkeypatch.setattr(unet, "BATCH", 8)
    losses: list[float] = []

    def note(stage: str, step: int, steps: int, loss: float) -> None:
        if stage == "draw":
            losses.append(loss)

    train(NAME, tmp_path, steps=12, progress=note)
    assert np.mean(losses[-3:]) < 0.8 * losses[0]


def draw(pipe: Any, count: int) -> list[tuple[Any, np.ndarray]]:
    told, settings = prompts(count, seed=3), zoo.info(NAME).settings
    texts, sampling = [one.text for one in told], (settings["steps"], settings["guidance"])
    images = generate_images(pipe, texts, 0, *sampling)
    return list(zip([one.scene for one in told], images, strict=True))


def share_right(pairs: list[tuple[Any, np.ndarray]]) -> float:
    right, asked = map(sum, zip(*(score_picture(*one) for one in pairs), strict=True))
    return float(right / asked)


@pytest.mark.exhaustive
def test_images_match_their_prompts_and_not_those_of_others(pipeline: Any) -> None:
    pairs = draw(pipeline, 8)
    scenes, images = zip(*pairs, strict=True)
    assert share_right(pairs) >= 0.85
    assert share_right(list(zip(scenes[1:], images[:-1], strict=True))) < 0.6


@pytest.mark.exhaustive
def test_an_untrained_text_encoder_draws_other_things(pipeline: Any) -> None:
    """Negative control: what is drawn is read from the prompt by the trained encoder."""
    torch.manual_seed(0)
    untrained = unet.text_encoder(len(models.tokenizer())).eval()
    other = type(pipeline)(**{**pipeline.components, "text_encoder": untrained})
    assert share_right(draw(other, 4)) < 0.6


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ("accelerated-diffusion-secant", 0.55),
        ("accelerated-diffusion-carried", 0.9),
        ("asd", 0.9),
        ("block-diffusion", 0.9),
    ],
)
def test_exact_recipes_take_its_sampler_with_noise_and_save_calls(
    pipeline: Any, recipe: str, share: float
) -> None:
    settings = zoo.info(NAME).settings
    fast: Any = mmspec.accelerate(type(pipeline)(**pipeline.components), recipe, **SWAPPED)
    request = {"num_inference_steps": settings["steps"], "guidance_scale": settings["guidance"]}
    output = fast(prompts(1, seed=3)[0].text, **request, seed=1, output_type="np")
    assert output.stats.exact
    assert output.stats.target_calls <= share * settings["steps"]
