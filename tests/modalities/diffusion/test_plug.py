"""Saving and loading accelerated pipelines; draft pipelines as folders or single networks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import mmspec
from mmspec import zoo
from mmspec.drafters.denoising.small_denoiser import pipeline_with_network
from mmspec.drafters.denoising.window import Window
from mmspec.modalities.diffusion import plug
from mmspec.modalities.diffusion.network import Network
from tests.modalities.sampling import FROZEN, draw
from tests.toys.pipelines import pipeline


def test_a_network_alone_is_saved_where_the_parts_are_shared(tmp_path: Path) -> None:
    pipe, other = pipeline("dit"), pipeline("dit", seed=9)
    small = pipeline_with_network(Network(pipe), other.transformer)
    fast: Any = mmspec.accelerate(
        pipe, "accelerated-diffusion", drafter=small, window=3, max_rows=4
    )
    assert isinstance(fast, mmspec.Accelerated)
    fast.save_pretrained(tmp_path)
    assert not (tmp_path / "drafter" / "model_index.json").exists()
    written = json.loads((tmp_path / "mmspec.json").read_text())
    assert written["parts"] == {"window": 3, "max_rows": 4}
    again: Any = mmspec.load(tmp_path, pipe)
    assert torch.equal(draw(again, "dit", seed=0), draw(fast, "dit", seed=0))
    assert fast.last_stats is not None
    assert again.last_stats.target_calls == fast.last_stats.target_calls
    assert again.last_stats.num_draft_tokens > 0


def test_a_pipeline_comes_back_with_its_target(tmp_path: Path) -> None:
    pipeline("ddpm").save_pretrained(tmp_path / "big")
    pipe = plug.load(tmp_path / "big")
    pipeline("ddpm", seed=9).save_pretrained(tmp_path / "small")
    fast: Any = mmspec.accelerate(pipe, "accelerated-diffusion", drafter=tmp_path / "small")
    fast.save_pretrained(tmp_path / "fast")
    assert (tmp_path / "fast" / "drafter" / "model_index.json").exists()
    again: Any = mmspec.load(tmp_path / "fast")
    assert again.model is not pipe
    assert torch.equal(draw(again, "ddpm", seed=0), draw(fast, "ddpm", seed=0))


def test_options_are_kept(tmp_path: Path) -> None:
    pipe = pipeline("dit")
    mmspec.accelerate(pipe, "taylorseer", interval=2, order=2).save_pretrained(tmp_path)
    again: Any = mmspec.load(tmp_path, pipe)
    assert (again.recipe.options["interval"], again.recipe.options["order"]) == (2, 2)


def test_what_cannot_be_kept_or_found_is_refused(tmp_path: Path) -> None:
    pipe = pipeline("ddpm")
    with pytest.raises(ValueError, match="window was given as an object"):
        mmspec.accelerate(pipe, "asd", window=Window(3)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="this one was made by hand"):
        mmspec.accelerate(pipe, FROZEN).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="there is no pipeline folder"):
        mmspec.accelerate(pipe, "accelerated-diffusion", drafter="./nowhere")
    mmspec.accelerate(pipe, "asd").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no target model"):
        mmspec.load(tmp_path)


def test_a_pipeline_that_was_read_by_path_is_saved_by_name(tmp_path: Path) -> None:
    pipeline("ddpm").save_pretrained(tmp_path / "pipe")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "pipe")
    mmspec.accelerate(pipe, "asd").save_pretrained(tmp_path / "fast")
    written = json.loads((tmp_path / "fast" / "mmspec.json").read_text())
    assert written["target"] == str(tmp_path / "pipe")
    assert mmspec.load(tmp_path / "fast").recipe.name == "asd"


def test_the_bundled_pipeline_needs_no_switches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PixArt bins sizes unless told not to, and knows no autoencoder but its own."""
    logger = logging.getLogger("diffusers")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "level", logging.WARNING)  # commands lower it
    pipe = zoo.load("diffusion")
    assert caplog.messages == []
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 2, "output_type": "np"}
    own = pipe("a red circle", generator=torch.Generator().manual_seed(0), **given).images
    same = {"use_resolution_binning": False, "clean_caption": False}
    given["generator"] = torch.Generator().manual_seed(0)
    assert (pipe("a red circle", **given, **same).images == own).all()
    fast: Any = mmspec.accelerate(pipe)
    assert fast("a red circle", num_inference_steps=3, seed=0).stats.num_new_tokens == 3
    with pytest.raises(ValueError, match="Invalid sample size"):
        pipe("a red circle", use_resolution_binning=True)
    with pytest.raises(ValueError, match="max_sequence_length=1000000000000 must be"):
        fast("a red circle", max_sequence_length=10**12)  # the tokenizer would end the process
    pipe.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(again).__module__.startswith("diffusers.")
    assert any("Expected types for vae" in message for message in caplog.messages)


@pytest.mark.parametrize(("max_rows", "is_warned"), [(4, True), (8, False), (None, False)])
def test_fewer_rows_than_a_window_are_warned_of_before_the_run(
    max_rows: int | None, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="mmspec"):
        mmspec.accelerate(pipeline("ddpm"), "asd", window=8, max_rows=max_rows)
    assert [one.message for one in caplog.records if "window of 8 states" in one.message] == (
        [one.message for one in caplog.records] if is_warned else []
    )
    assert bool(caplog.records) == is_warned


@pytest.mark.exhaustive
def test_a_window_longer_than_the_steps_is_refused_before_any_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe, calls = pipeline("ddpm"), []
    pipe.unet.register_forward_pre_hook(lambda *_: calls.append(1))
    for parts in ({"window": 6}, {"tree": [1, 1, 1, 1, 1]}):
        fast: Any = mmspec.accelerate(pipe, "asd", **parts)
        with pytest.raises(ValueError, match="window of 6 states is longer than the chain"):
            fast(batch_size=1, num_inference_steps=5, seed=0)
    assert not calls
    assert not caplog.messages


def test_a_bundled_draft_model_is_no_pipeline() -> None:
    with pytest.raises(ValueError, match=r"is a draft model of zoo:diffusion, .* as the drafter"):
        plug.load("zoo:diffusion-drafter")


@pytest.mark.exhaustive
def test_rows_are_not_limited_by_a_recipe_that_keeps_the_loop() -> None:
    with pytest.raises(ValueError, match="'taylorseer' calls the network with the rows of the"):
        mmspec.accelerate(pipeline("dit"), "taylorseer", max_rows=2)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("asd", {"root": "fresh"}, "root='fresh' is not known; choose one of refresh, prefetch"),
        ("accelerated-diffusion-carried", {"freeze": "x0"}, "freeze='x0' is not known"),
        ("taylorseer", {"order": 10**9}, "order=1000000000 must be .*at most 16"),
    ],
)
def test_options_are_refused_before_a_call(
    recipe: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(pipeline("dit"), recipe, **options)
