"""The zoo's text-to-image pair: trained from a seed, loaded like any pipeline, right on prompts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline, PixArtAlphaPipeline

from mmspec import zoo
from mmspec.modalities.diffusion.zoo import models
from mmspec.modalities.diffusion.zoo import train as diffusion_train
from mmspec.modalities.diffusion.zoo.evaluate import draw, facts_drawn, overlap
from mmspec.modalities.diffusion.zoo.loading import load_denoiser, load_pipeline
from mmspec.modalities.diffusion.zoo.training import encoded, pictures
from mmspec.modalities.vlm.zoo.train import train
from mmspec.zoo.facts import mentions
from mmspec.zoo.prompts import loose_prompt, prompt, prompts, training_scenes
from mmspec.zoo.reading import read_all, score_picture

NAMES = [name for name in zoo.names() if zoo.modality(name).name == "diffusion"]
LEAST_FACTS = 0.85  # of eight prompts at fifty steps
present = pytest.mark.skipif(
    not all(zoo.is_present(name) for name in NAMES), reason="the pair is not trained yet"
)


@pytest.fixture(scope="module")
def pipeline() -> PixArtAlphaPipeline:
    return load_pipeline(zoo.path("diffusion"))


def test_prompts_say_what_the_scene_shows() -> None:
    for told in prompts(100):
        said = [(m.size, m.colour, m.name, m.place) for m in mentions(told.text)]
        assert said == list(told.scene.facts())
        assert 1 <= len(said) <= 3
        assert told.scene.split == "held-out"


def test_training_prompts_say_nothing_false_and_now_and_then_leave_something_out() -> None:
    generator = np.random.default_rng(0)
    left_out = 0
    for scene in itertools.islice(training_scenes(0), 200):
        assert scene.split == "train"
        words = loose_prompt(scene, generator).replace(",", "").split()
        true = set(prompt(scene).replace(",", "").split()) | {"a", "an"}
        assert set(words) <= true
        left_out += len(words) < 3 * len(scene.things)
    assert left_out < 60


def test_the_tokenizer_knows_every_word() -> None:
    words = models.tokenizer()
    generator = np.random.default_rng(1)
    for scene in itertools.islice(training_scenes(1), 200):
        ids = words(loose_prompt(scene, generator)).input_ids
        assert words.unk_token_id not in ids
        assert ids[-1] == words.eos_token_id
    assert words("").input_ids == [words.eos_token_id]


def test_training_writes_a_pipeline_that_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    report = train("diffusion", tmp_path, steps=3, progress=lambda *told: stages.append(told[0]))
    assert list(dict.fromkeys(stages)) == ["paint", "read", "encode", "draw"]
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded, PixArtAlphaPipeline)
    pictures = draw(loaded, ["a large red circle in the center", ""], steps=2)
    assert pictures.shape == (2, 48, 48, 3)
    assert np.isfinite(pictures).all()
    assert report["steps"] == 3
    assert "zoo train diffusion" in (tmp_path / "README.md").read_text()


@present
def test_training_writes_a_drafter_that_loads(tmp_path: Path) -> None:
    report = train("diffusion-drafter", tmp_path, steps=3)
    assert load_denoiser(tmp_path).config["num_layers"] == models.DRAFTER.layers
    assert 0 <= report["acceptance"] <= 1


@pytest.mark.slow
def test_training_is_a_function_of_its_seed(tmp_path: Path) -> None:
    for run in ("one", "two"):
        train("diffusion", tmp_path / run, steps=1, seed=5)
    files = [sorted((tmp_path / run).rglob("*.safetensors")) for run in ("one", "two")]
    assert len(files[0]) == 3
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_every_diffusion_checkpoint_has_a_plan() -> None:
    assert set(diffusion_train.PLANS) == set(NAMES)


@present
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_a_small_ordinary_folder(name: str) -> None:
    files = [file for file in zoo.path(name).rglob("*") if file.is_file()]
    assert max(file.stat().st_size for file in files) <= 6_000_000
    assert {file.suffix for file in files} <= {".json", ".md", ".safetensors"}
    assert (zoo.path(name) / "README.md").exists()


@present
def test_the_pair_loads_in_float32_and_fits_together(pipeline: Any) -> None:
    target, drafter = zoo.load("diffusion").transformer, zoo.load("diffusion-drafter")
    assert {p.dtype for p in [*target.parameters(), *drafter.parameters()]} == {torch.float32}
    assert all(p.isfinite().all() for p in [*target.parameters(), *drafter.parameters()])
    for key in ("in_channels", "out_channels", "sample_size", "caption_channels"):
        assert target.config[key] == drafter.config[key]
    assert len(target.transformer_blocks) >= 4 * len(drafter.transformer_blocks)
    assert isinstance(pipeline.scheduler, DDPMScheduler)
    assert zoo.load("diffusion", torch.bfloat16).transformer.dtype == torch.bfloat16


@present
def test_the_autoencoder_keeps_the_facts(pipeline: Any) -> None:
    scenes = [told.scene for told in prompts(40, seed=2)]
    latents = encoded(pipeline.vae, scenes)
    assert 0.8 < float(latents.std()) < 1.25
    with torch.no_grad():
        shown = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    assert float((shown - pictures(scenes)).square().mean()) < 0.02
    images = shown.clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 1).numpy()
    scored = np.array(
        [score_picture(s, r) for s, r in zip(scenes, read_all(list(images)), strict=True)]
    ).sum(0)
    assert scored[0] >= 0.97 * scored[1]


@present
def test_pictures_show_what_the_prompts_say(pipeline: Any) -> None:
    right, asked = facts_drawn(pipeline, prompts(8, seed=3), steps=50)
    assert right >= LEAST_FACTS * asked


@present
def test_words_matter(pipeline: Any) -> None:
    """The pictures of some prompts, held against the scenes of others, are mostly wrong."""
    told = prompts(8, seed=3)
    drawn = draw(pipeline, [p.text for p in told], steps=20)
    others = [score_picture(p.scene, image) for p, image in zip(told[1:], drawn[:-1], strict=True)]
    assert sum(right for right, _ in others) < 0.6 * sum(asked for _, asked in others)


@present
def test_the_drafter_follows_and_an_untrained_one_does_not(pipeline: Any) -> None:
    texts = [p.text for p in prompts(2, seed=4)]
    drafter = zoo.load("diffusion-drafter")
    assert overlap(pipeline.transformer, pipeline, texts, steps=10) == 1.0
    trained = overlap(drafter, pipeline, texts, steps=50)
    untrained = overlap(models.denoiser(models.DRAFTER), pipeline, texts, steps=50)
    assert trained > untrained + 0.2
