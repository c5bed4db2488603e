"""The bundled diffusion pair: training from a seed, loading, and correct facts on prompts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline, PixArtAlphaPipeline

from mmspec import zoo
from mmspec.modalities.diffusion.checkpoints import load
from mmspec.modalities.diffusion.image_distance import has_ink, paper_of
from mmspec.zoo import train
from mmspec.zoo.prompts import iterate_training_scenes, prompts, write_varied_prompt
from mmspec.zoo.scene_parser import parse_images, score_picture
from mmspec.zoo.scene_tensors import render_images
from tools.zoo.diffusion import models
from tools.zoo.diffusion import train as training
from tools.zoo.diffusion.evaluate import generate_images, score_generated_images, state_overlap
from tools.zoo.diffusion.training import encode_scenes

LEAST_FACTS = 0.85  # of eight prompts at fifty steps


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step on few images, through all stages."""
    monkeypatch.setattr(training, "BATCH", 8)


@pytest.fixture(scope="module")
def pipeline() -> PixArtAlphaPipeline:
    return zoo.load("diffusion")


def test_the_tokenizer_knows_every_word() -> None:
    words = models.tokenizer()
    generator = np.random.default_rng(1)
    for scene in itertools.islice(iterate_training_scenes(1), 200):
        ids = words(write_varied_prompt(scene, generator)).input_ids
        assert words.unk_token_id not in ids
        assert ids[-1] == words.eos_token_id
    assert words("").input_ids == [words.eos_token_id]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_few")
def test_training_writes_a_pipeline_that_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    report = train("diffusion", tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    assert list(dict.fromkeys(stages)) == ["paint", "read", "encode", "draw"]
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded, PixArtAlphaPipeline)
    pictures = generate_images(loaded, ["a large red circle in the center", ""], steps=2)
    assert pictures.shape == (2, 48, 48, 3)
    assert np.isfinite(pictures).all()
    assert report["steps"] == 1
    assert "zoo train diffusion" in (tmp_path / "README.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_few")
def test_training_writes_a_drafter_that_loads(tmp_path: Path) -> None:
    report = train("diffusion-drafter", tmp_path, steps=1)
    assert (
        load(zoo.info("diffusion-drafter"), tmp_path).config["num_layers"] == models.DRAFTER.layers
    )
    assert 0 <= report["acceptance"] <= 1


@pytest.mark.slow
def test_training_is_a_function_of_its_seed(tmp_path: Path) -> None:
    for run in ("one", "two"):
        train("diffusion", tmp_path / run, steps=1, seed=5)
    files = [sorted((tmp_path / run).rglob("*.safetensors")) for run in ("one", "two")]
    assert len(files[0]) == 3
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]


def test_the_pair_fits_together(pipeline: Any) -> None:
    target, drafter = zoo.load("diffusion").transformer, zoo.load("diffusion-drafter")
    for key in ("in_channels", "out_channels", "sample_size", "caption_channels"):
        assert target.config[key] == drafter.config[key]
    assert len(target.transformer_blocks) >= 4 * len(drafter.transformer_blocks)
    assert isinstance(pipeline.scheduler, DDPMScheduler)


def test_the_autoencoder_keeps_the_facts(pipeline: Any) -> None:
    scenes = [told.scene for told in prompts(20, seed=2)]
    latents = encode_scenes(pipeline.vae, scenes)
    assert 0.8 < float(latents.std()) < 1.25
    with torch.no_grad():
        shown = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    assert float((shown - render_images(scenes)).square().mean()) < 0.02
    images = shown.clamp(-1, 1).add(1).div(2).permute(0, 2, 3, 1).numpy()
    scored = np.array(
        [score_picture(s, r) for s, r in zip(scenes, parse_images(list(images)), strict=True)]
    ).sum(0)
    assert scored[0] >= 0.97 * scored[1]


@pytest.mark.exhaustive
def test_images_match_their_prompts(pipeline: Any) -> None:
    right, asked = score_generated_images(pipeline, prompts(8, seed=3), steps=50)
    assert right >= LEAST_FACTS * asked


@pytest.mark.exhaustive
def test_words_matter(pipeline: Any) -> None:
    """Negative control: images compared with the scenes of other prompts are mostly wrong."""
    told = prompts(8, seed=3)
    drawn = generate_images(pipeline, [p.text for p in told], steps=20)
    others = [score_picture(p.scene, image) for p, image in zip(told[1:], drawn[:-1], strict=True)]
    assert sum(right for right, _ in others) < 0.6 * sum(asked for _, asked in others)


@pytest.mark.exhaustive
def test_the_drafter_follows_and_an_untrained_one_does_not(pipeline: Any) -> None:
    texts = [p.text for p in prompts(1, seed=4)]
    drafter = zoo.load("diffusion-drafter")
    assert state_overlap(pipeline.transformer, pipeline, texts, steps=10) == 1.0
    trained = state_overlap(drafter, pipeline, texts, steps=25)
    untrained = state_overlap(models.denoiser(models.DRAFTER), pipeline, texts, steps=25)
    assert trained > untrained + 0.2


@pytest.fixture(scope="module")
def textured() -> PixArtAlphaPipeline:
    return zoo.load("diffusion-textured")


def test_pruning_keeps_evenly_spaced_layers() -> None:
    base = models.denoiser(models.DenoiserShape(layers=5, width=16, heads=2))
    pruned = models.prune_layers(base, models.DenoiserShape(layers=3, width=16, heads=2))
    kept = [base.transformer_blocks[index] for index in (0, 2, 4)]
    for mine, theirs in zip(pruned.transformer_blocks, kept, strict=True):
        assert torch.equal(mine.scale_shift_table, theirs.scale_shift_table)
        assert torch.equal(mine.attn1.to_q.weight, theirs.attn1.to_q.weight)
    assert torch.equal(pruned.proj_out.weight, base.proj_out.weight)


@pytest.mark.slow
@pytest.mark.usefixtures("_few")
def test_training_on_tiles_starts_from_the_plain_model(tmp_path: Path) -> None:
    stages: list[str] = []
    said: Any = lambda *told: stages.append(told[0])  # noqa: E731
    report = train("diffusion-textured", tmp_path, steps=1, progress=said)
    assert list(dict.fromkeys(stages)) == ["paint", "decode", "encode", "draw"]
    assert {"facts", "facts_in_50_steps"} <= report.keys()
    made, base = load(zoo.info("diffusion-textured"), tmp_path), zoo.load("diffusion")
    first, last = (made.transformer.transformer_blocks[at] for at in (0, -1))
    for mine, theirs in ((first, 0), (last, -1)):
        near = base.transformer.transformer_blocks[theirs].attn1.to_k.weight
        assert torch.allclose(mine.attn1.to_k.weight, near, atol=0.05)


@pytest.mark.exhaustive
def test_textured_images_match_their_prompts_in_few_steps(textured: Any) -> None:
    """By the deterministic sampler that it is shipped with; those of other prompts do not."""
    told, settings = prompts(8, seed=3), zoo.info("diffusion-textured").settings
    drawn = generate_images(
        textured, [p.text for p in told], steps=settings["steps"], guidance=settings["guidance"]
    )
    scores = [score_picture(p.scene, one) for p, one in zip(told, drawn, strict=True)]
    right, asked = (sum(each) for each in zip(*scores, strict=True))
    assert right >= LEAST_FACTS * asked
    others = [score_picture(p.scene, one) for p, one in zip(told[1:], drawn[:-1], strict=True)]
    assert sum(each for each, _ in others) < 0.6 * sum(each for _, each in others)


def test_textured_images_have_no_blank_background(textured: Any, pipeline: Any) -> None:
    """So a distance on ink is one of most of the picture."""
    text = prompts(1, seed=3)[0].text
    shares = [
        has_ink(drawn, paper_of(drawn)).mean()
        for drawn in (generate_images(pipe, [text], steps=6) for pipe in (textured, pipeline))
    ]
    assert shares[0] > 0.5
    assert shares[1] < 0.2
