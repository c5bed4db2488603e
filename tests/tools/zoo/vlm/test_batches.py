"""Bundled language models: loading, and facts right on held-out scenes."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from mmspec import zoo
from mmspec.modalities.common.formatting import get_tokenizer
from mmspec.zoo.language import examples, format_prompt, words
from mmspec.zoo.scene_tensors import render_pixels
from tests.covering import exhaustive, limited
from tools.zoo.vlm.batches import Encoder, Sample, render_drawing, render_textured
from tools.zoo.vlm.evaluate import acceptance, facts_right
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.train import PLANS

VLMS = [  # whole models; heads have no words of their own
    name
    for name in zoo.names()
    if zoo.modality(name).name == "vlm" and zoo.info(name).sees != "target-states"
]
TARGETS = [
    name for name in VLMS if zoo.info(name).kind == "target" and zoo.info(name).sees == "pixels"
]
DRAFTERS = [name for name in VLMS if zoo.info(name).kind == "drafter"]
PICTURED = [name for name in TARGETS if name in FAMILIES]  # others learn from clips


@pytest.mark.parametrize("name", VLMS)
def test_a_checkpoint_has_all_that_generate_needs(name: Any) -> None:
    folder = zoo.path(name)
    found = {file.name for file in folder.iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert wanted | {"tokenizer_config.json", "chat_template.jinja", "README.md"} <= found
    ids = json.loads((folder / "generation_config.json").read_text())
    tokenizer = getattr(zoo.processor(name), "tokenizer", zoo.processor(name))
    assert ids["eos_token_id"] == tokenizer.eos_token_id
    assert ids["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize("name", limited(TARGETS, 2))
def test_targets_are_deep(name: Any) -> None:
    assert zoo.load(name).config.get_text_config().num_hidden_layers >= 12


@pytest.mark.parametrize("name", exhaustive(DRAFTERS, [*DRAFTERS][::2]))
def test_drafters_are_shallow_and_share_the_words_of_their_target(name: Any) -> None:
    config = zoo.load(name).config.get_text_config()
    target = zoo.info(name).target
    theirs: Any = zoo.load(target).config.get_text_config()  # type: ignore[arg-type]
    assert config.num_hidden_layers <= theirs.num_hidden_layers / 4
    assert config.vocab_size == theirs.vocab_size
    ours, words_of = (get_tokenizer(zoo.processor(one)) for one in (name, target))  # type: ignore[arg-type]
    assert ours.get_vocab() == words_of.get_vocab()


@pytest.mark.parametrize("name", TARGETS)
def test_processors_lose_no_words(name: Any) -> None:
    processor = zoo.processor(name)
    for example in examples(40, "held-out", size=8):
        ids = processor.tokenizer(example.answer).input_ids
        assert processor.tokenizer.unk_token_id not in ids
        assert len(ids) == len(words(example.answer))
        assert processor.tokenizer.decode(ids) == example.answer


@pytest.mark.parametrize("name", PICTURED)
def test_training_feeds_what_the_processor_feeds(name: Any) -> None:
    family, processor = FAMILIES[name], zoo.processor(name)
    example = examples(1, "held-out", size=48)[0]
    picture = render_pixels(example.scene)
    ours = Encoder(family, processor)([Sample(picture, example.prompt, example.answer)])
    text = format_prompt(processor, example.prompt)
    theirs = processor(text=text, images=example.image, return_tensors="pt")
    length = theirs["input_ids"].shape[1]
    assert torch.equal(ours.ids[:, :length], theirs["input_ids"])
    inputs = family.image_inputs(picture[None])
    for key, value in inputs.items():
        torch.testing.assert_close(value, theirs[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", TARGETS)
def test_large_pictures_arrive_at_the_size_of_the_model(name: Any) -> None:
    processor = zoo.processor(name)
    text = format_prompt(processor, "what do you see?")
    shapes = set()
    for size in (48, 192, 256):
        image = examples(1, size=size)[0].image
        inputs = processor(text=text, images=image, return_tensors="pt")
        shapes.add((inputs["pixel_values"].shape, inputs["input_ids"].shape))
    assert len(shapes) == 1


def test_squares_of_all_sizes_are_read_on_one_grid() -> None:
    reads = zoo.processor("qwen2.5-vl").image_processor
    counts = {reads.get_number_of_image_patches(side, side, {}) for side in range(40, 2049)}
    assert counts == {144}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PICTURED)
def test_targets_get_held_out_facts_right(name: Any) -> None:
    right, asked = facts_right(
        zoo.load(name), zoo.processor(name), examples(24, "held-out", seed=3)
    )
    assert asked > 50
    assert right >= 0.95 * asked


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURED)
def test_drafters_follow_and_the_sighted_one_follows_further(name: Any) -> None:
    family, processor = FAMILIES[name], zoo.processor(name)
    encoder, target = Encoder(family, processor), zoo.load(name)
    sighted, blind = (
        acceptance(zoo.load(drafter), target, encoder, 64)  # type: ignore[arg-type]
        for drafter in (zoo.info(name).drafter, f"{name}-text-drafter")
    )
    assert 2.5 <= sighted <= 5
    assert sighted > blind + 0.3


@pytest.mark.exhaustive
@pytest.mark.parametrize("renderer", [render_textured, render_drawing])
@pytest.mark.parametrize("name", PICTURED)
def test_drafters_that_see_follow_on_any_background(name: Any, renderer: Any) -> None:
    encoder, target = Encoder(FAMILIES[name], zoo.processor(name)), zoo.load(name)
    drafter: Any = zoo.info(name).drafter
    assert acceptance(zoo.load(drafter), target, encoder, 32, renderer=renderer) > 3.2


@pytest.mark.parametrize("name", list(PLANS))
def test_plans_build_what_is_there(name: Any) -> None:
    """Weights of the same shapes, and windows of the same layers and size."""
    family, there = FAMILIES[PLANS[name].family], zoo.load(name)
    made = family.build(PLANS[name].shape, family.build_processor().tokenizer)
    assert {n: w.shape for n, w in made.named_parameters()} == {
        n: w.shape for n, w in there.named_parameters()
    }
    if hasattr(there.config, "vision_config") and PLANS[name].family == "qwen2.5-vl":
        for setting in ("fullatt_block_indexes", "window_size"):
            ours, theirs = (getattr(m.config.vision_config, setting) for m in (made, there))
            assert list(np.atleast_1d(ours)) == list(np.atleast_1d(theirs))


@pytest.mark.exhaustive
def test_pictures_matter_to_a_target() -> None:
    """The same question about another picture gets another answer."""
    model, processor = zoo.load("llava"), zoo.processor("llava")
    text = format_prompt(processor, "describe the picture.")
    said = []
    for example in examples(4, "held-out"):
        inputs = processor(text=text, images=example.image, return_tensors="pt")
        said.append(model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, -16:])
    assert len({tuple(np.asarray(row)) for row in said}) == 4
