"""The bundled low-resolution model: correct images, exact drafting, and fewer calls."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import mmspec
from mmspec import recipes, zoo
from mmspec.codes.resampling import TrainedResampler
from mmspec.drafters.rows.upsampled import UpsampledDrafter
from mmspec.models.code_resampler import FOLDER, load_resampler
from mmspec.zoo import train
from mmspec.zoo.prompts import iterate_training_scenes, prompts
from mmspec.zoo.scene_parser import score_picture
from mmspec.zoo.scene_tensors import encode_boards, render_images
from tools.zoo.image import models
from tools.zoo.image.coding import encode_latents
from tools.zoo.image.evaluate import generate_codes
from tools.zoo.image.low_resolution_coding import KINDS, SMALL, encode_kinds, kind_attributes

NAME = "image-sketch"
HOW: dict[str, Any] = {"guidance": models.GUIDANCE, "temperature": 1.0}
LEAST_SEEN, LEAST_DRAWN = 0.7, 0.8
LEAST_EXACT, LEAST_LOSSY = 1.6, 5.0  # codes per target call
ASKED = prompts(6, seed=11)


@pytest.fixture(scope="module")
def target() -> Any:
    return zoo.load("image")


@pytest.fixture(scope="module")
def sketch() -> Any:
    return zoo.load(NAME)


def bound(target: Any, sketch: Any, recipe: str = "mulo-sd", **options: Any) -> Any:
    drafter = None if recipe == "plain" else sketch
    made = zoo.processor("image")
    return mmspec.accelerate(target, recipe, drafter=drafter, processor=made, **options)


def test_codes_stand_for_names_colours_and_sizes() -> None:
    scenes = list(islice(iterate_training_scenes(3), 100))
    codes = encode_kinds(scenes)
    assert torch.equal(kind_attributes(codes), encode_boards(scenes))
    every = torch.arange(1 + KINDS)
    assert len(kind_attributes(every).unique(dim=0)) == 1 + KINDS


@torch.no_grad()
def kinds_seen(coder: Any, images: Tensor) -> Tensor:  # (B, 3, p, p) -> (B, 9) int64
    """The encoded code of each cell."""
    book = functional.normalize(coder.quantize.embedding.weight, dim=-1)
    return (
        torch.einsum("bdhw, kd -> bhwk", encode_latents(coder, images), book).argmax(-1).flatten(1)
    )


def test_the_picture_part_sees_things_whole(sketch: Any) -> None:
    scenes = [one.scene for one in prompts(60, seed=12)]
    wanted = encode_kinds(scenes)
    coder = sketch.model.vqmodel
    with torch.no_grad():
        seen = encode_latents(coder, render_images(scenes, SMALL.pixels)).flatten(2).transpose(1, 2)
        book = functional.normalize(coder.quantize.embedding.weight, dim=-1)
    found = (seen @ book.T).argmax(-1)
    assert float((found == wanted)[wanted > 0].float().mean()) > LEAST_SEEN
    assert float((found == wanted)[wanted == 0].float().mean()) > 0.98


def test_small_images_match_their_prompts(sketch: Any) -> None:
    asked = prompts(24, seed=13)
    drawn = generate_codes(sketch, models.processor(SMALL), [one.text for one in asked])
    wanted = encode_kinds([one.scene for one in asked])
    assert float((drawn == wanted)[wanted > 0].float().mean()) > LEAST_DRAWN
    assert float((drawn == wanted)[wanted == 0].float().mean()) > 0.9


def test_the_resampler_lies_beside_it_and_is_found(target: Any, sketch: Any) -> None:
    fast = bound(target, sketch)
    drafter = fast.session.bound.drafter
    assert isinstance(drafter, UpsampledDrafter)
    assert isinstance(drafter.sampler, TrainedResampler)
    assert drafter.ratio == 3
    assert not fast.recipe.exact
    given = bound(target, sketch, upsampler=str(zoo.path(NAME) / FOLDER))
    assert isinstance(given.session.bound.drafter.sampler, TrainedResampler)
    other = load_resampler(zoo.path(NAME) / FOLDER)
    other.fine_mark.neg_()
    with pytest.raises(ValueError, match="another codebook of the target"):
        bound(target, sketch, upsampler=other)


@pytest.mark.exhaustive
def test_exact_drafting_gives_the_plain_image_in_few_calls(target: Any, sketch: Any) -> None:
    """Coupled with the same seed: every code is equal, even for drafts of other prompts."""
    plain, fast = bound(target, sketch, "plain"), bound(target, sketch, verifier="coupled")
    assert fast.recipe.exact
    calls = []
    for number, one in enumerate(ASKED):
        how = {**HOW, "prompt": one.text, "seed": number}
        made = fast.generate_images(**how)
        assert torch.equal(made.sequences, plain.generate_images(**how).sequences)
        assert made.stats.fallback is None
        calls.append(made.stats.target_calls)
    assert models.SIDE**2 / fmean(calls) > LEAST_EXACT


@pytest.mark.exhaustive
def test_greedy_drafting_is_greedy_decoding(target: Any, sketch: Any) -> None:
    prompts = [one.text for one in ASKED[:3]]
    how = {"guidance": models.GUIDANCE, "prompt": prompts, "do_sample": False}
    wanted = bound(target, sketch, "plain").generate_images(**how).sequences
    for verifier in ("coupled", "rejection"):
        made = bound(target, sketch, verifier=verifier).generate_images(**how)
        assert torch.equal(made.sequences, wanted)
        assert made.stats.fallback is None
        assert made.stats.target_calls < models.SIDE**2 / 1.5


@pytest.mark.exhaustive
def test_rejection_carries_the_distributions_of_the_sketch(target: Any, sketch: Any) -> None:
    """Other images than plain decoding, from the same distribution, in fewer calls than codes."""
    fast = bound(target, sketch, verifier="rejection")
    assert fast.recipe.exact
    made = fast.generate_images(**HOW, prompt=ASKED[0].text, seed=0)
    assert made.stats.fallback is None
    assert made.stats.target_calls < models.SIDE**2 / 1.5


@pytest.mark.exhaustive
def test_lossy_drafting_keeps_the_facts(target: Any, sketch: Any) -> None:
    fast, calls, right, asked = bound(target, sketch), [], 0, 0
    for number, one in enumerate(prompts(12, seed=14)):
        made = fast.generate_images(**HOW, prompt=one.text, seed=number)
        calls.append(made.stats.target_calls)
        scored = score_picture(one.scene, made.images[0])
        right, asked = right + scored[0], asked + scored[1]
    assert right > LEAST_DRAWN * asked
    assert models.SIDE**2 / fmean(calls) > LEAST_LOSSY


@pytest.mark.exhaustive
def test_rows_do_not_depend_on_their_batch(target: Any, sketch: Any) -> None:
    fast = bound(target, sketch, verifier="coupled")
    texts = [one.text for one in ASKED[:3]]
    both = fast.generate_images(**HOW, prompt=texts, seed=3).sequences
    for row, text in enumerate(texts):
        alone = fast.generate_images(**HOW, prompt=text, seed=3, row_ids=[row]).sequences
        assert torch.equal(alone[0], both[row])


def test_it_is_saved_with_its_resampler(target: Any, sketch: Any, tmp_path: Path) -> None:
    bound(target, sketch, tau=0.3).save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, model=target)
    assert isinstance(again.session.bound.drafter, UpsampledDrafter)
    assert isinstance(again.session.bound.drafter.sampler, TrainedResampler)


def test_the_command_line_chooses_it() -> None:
    named = {"mulo-sd": "image-sketch", "coupled": "image-drafter", "eagle": "image-head"}
    for recipe, drafter in named.items():
        assert zoo.drafter_for("zoo:image", recipes.get(recipe)) == f"zoo:{drafter}"


@pytest.mark.slow
def test_training_writes_what_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    report = train(NAME, tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    order = ["see", "draw", "encode", "enlarge", "watch", "follow"]
    assert [s for s, last in zip(stages, ["", *stages], strict=False) if s != last] == order
    assert report["codes_per_call_exact"] >= 1
    assert "zoo train image-sketch" in (tmp_path / "README.md").read_text()
    assert load_resampler(tmp_path / FOLDER).config.ratio == 3
