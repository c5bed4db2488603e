"""The parser's text states what is in an image, and drafts for a model that describes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.zoo.captions import AT
from mmspec.zoo.language import examples, format_prompt
from mmspec.zoo.page_text import read_picture
from mmspec.zoo.scene import sample


def test_every_thing_is_read() -> None:
    scene = sample(3)
    image = scene.render(192)
    text = read_picture(image)
    assert text.count(".") == len(scene.things)
    for thing in scene.things:
        assert f"{thing.colour} {thing.name} is {AT[thing.place]}." in text
    with pytest.raises(ValueError, match="known=2"):
        read_picture(image, known=2)


@pytest.mark.exhaustive
def test_a_part_of_the_things_is_read() -> None:
    image = sample(3).render(192)
    text = read_picture(image)
    parts = [read_picture(image, known=0.5, seed=seed) for seed in range(3)]
    assert len({text, *parts}) > 2
    assert all(sentence in text for part in parts for sentence in part.split(". "))
    assert read_picture(image, known=0.0) == ""


@pytest.mark.exhaustive
def test_a_page_is_the_models_own_and_its_text_is_accepted() -> None:
    """HSD on captions: as many texts as rows; without the text nothing is drafted."""
    model, processor = zoo.load("llava"), zoo.processor("llava")
    shown = examples(3, "held-out", 1, "caption")
    inputs: dict[str, Any] = processor(
        text=[format_prompt(processor, one.prompt) for one in shown],
        images=[one.image for one in shown],
        padding=True,
        return_tensors="pt",
    )
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 64}
    want = model.generate(**inputs, **how)
    fast = mmspec.accelerate(model, "hsd", processor=processor, window=2)
    texts = [read_picture(one.image) for one in shown]
    found = fast.generate(**inputs, **how, drafter_inputs={"draft": texts})
    assert torch.equal(found.sequences, want)
    assert found.stats.num_accepted_draft_tokens > 20
    assert fast.generate(**inputs, **how).stats.num_draft_tokens == 0
