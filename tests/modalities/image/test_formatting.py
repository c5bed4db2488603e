"""Text prompts are tokenized by a family's processor."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.modalities.image import chameleon, emu3
from mmspec.modalities.image import families as image
from tests import toys
from tests.toys import image_models, processors

TEXTS = ["a large red circle", "a blue square"]


@lru_cache(maxsize=4)
def fast(recipe: str = "plain") -> Any:
    return mmspec.accelerate(image_models.janus(), recipe, processor=processors.janus())


def tensors(texts: list[str]) -> dict[str, Any]:
    shape = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    made = processors.janus()(text=texts, generation_mode="image", **shape)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def test_text_prompts_equal_their_tensors() -> None:
    given = tensors(TEXTS)
    assert given["attention_mask"][1, 0] == 0  # rows of different length
    assert given["input_ids"][:, -1].tolist() == [image_models.BOI] * 2
    wanted = fast().generate_images(**given, temperature=1.0, seed=3)
    found = fast().generate_images(prompt=TEXTS, temperature=1.0, seed=3)
    assert torch.equal(found.sequences, wanted.sequences)
    single = fast().generate_images(prompt=TEXTS[0], temperature=1.0, seed=3)
    assert torch.equal(single.sequences, wanted.sequences[:1])
    assert not torch.equal(found.sequences[:1], found.sequences[1:])


def test_a_processor_is_given_when_a_recipe_is_loaded(tmp_path: Path) -> None:
    fast().save_pretrained(tmp_path)
    again = mmspec.load(tmp_path, image_models.janus(), processor=processors.janus())
    settings: dict[str, Any] = {"prompt": TEXTS, "temperature": 1.0, "seed": 3}
    wanted = fast().generate_images(**settings).sequences
    assert torch.equal(again.generate_images(**settings).sequences, wanted)
    with pytest.raises(ValueError, match="procesor"):
        mmspec.load(tmp_path, image_models.janus(), procesor=processors.janus())


def test_a_chat_form_is_used_where_there_is_one() -> None:
    processor = processors.janus()
    processor.chat_template = (
        "{% for m in messages %}user : {{ m['content'][0]['text'] }}{% endfor %} assistant :"
    )
    chatty = mmspec.accelerate(image_models.janus(), "plain", processor=processor)
    found = chatty.session.prepare_request(prompt="a red circle").inputs["prompt_ids"]
    assert found.tolist() == tensors(["user : a red circle assistant :"])["input_ids"].tolist()


def test_negative_prompts_may_be_texts() -> None:
    negative = tensors(["a small"] * 2)
    wanted = fast().generate_images(prompt=TEXTS, negative=negative, guidance=3.0)
    found = fast().generate_images(prompt=TEXTS, negative="a small", guidance=3.0)
    assert torch.equal(found.sequences, wanted.sequences)
    other = fast().generate_images(prompt=TEXTS, guidance=3.0)
    assert not torch.equal(found.sequences, other.sequences)


def test_emu3_prompts_name_the_size_and_end_with_begin_of_image() -> None:
    image_family, processor = image.image_family(image_models.emu3()), processors.emu3()
    made = emu3.words(processor, TEXTS, image_family.layout(2, 3))
    text = processor.tokenizer.decode(made["input_ids"][0])
    assert text.replace(" ", "").endswith("circle<boi>2*3<wrap>")
    assert made["attention_mask"][1].tolist() == [0, *[1] * (made["input_ids"].shape[1] - 1)]
    drawn = mmspec.accelerate(image_models.emu3(), "plain", processor=processor)
    out = drawn.generate_images(prompt=TEXTS, grid=(2, 3), negative="")
    assert out.ids.shape == (2, 2, 3)


def test_chameleon_prompts_end_with_begin_of_image() -> None:
    processor = processors.chameleon()
    made = chameleon.words(
        processor, TEXTS, image.image_family(image_models.chameleon()).layout(2, 2)
    )
    assert made["input_ids"][:, -1].tolist() == [image_models.BOI] * 2
    assert made["attention_mask"][1].tolist()[:2] == [0, 1]


def test_every_code_has_its_round() -> None:
    plain = fast().generate_images(prompt=TEXTS[0])
    assert plain.rounds.flatten().tolist() == list(range(image_models.SIDE**2))
    out = fast("sjd").generate_images(prompt=TEXTS, temperature=1.0, seed=1)
    for row in out.rounds:
        turns = row.flatten()
        assert turns[0] == 0
        assert bool((turns.diff() >= 0).all())
        assert turns.unique().tolist() == list(range(int(turns[-1]) + 1))
    assert int(out.rounds.max()) == out.stats.target_calls


def test_the_model_s_own_loop_gives_the_greedy_image() -> None:
    drawing = fast().session.prepare_request(prompt=TEXTS, guidance=3.0)
    peer = drawing.image_family.native_generate
    assert peer is not None
    wanted = fast().generate_images(prompt=TEXTS, guidance=3.0)
    assert torch.equal(peer(drawing.inputs, drawing.sampling), wanted.sequences)
    assert image.image_family(image_models.llamagen_class()).native_generate is None


def test_unsupported_text_prompts_are_refused() -> None:
    deaf = mmspec.accelerate(image_models.janus(), "plain")
    with pytest.raises(ValueError, match=r"needs the model's processor; .*processor=\.\.\."):
        deaf.generate_images(prompt="a red circle")
    wordless = mmspec.accelerate(
        image_models.llamagen_caption(), "plain", processor=processors.janus()
    )
    with pytest.raises(ValueError, match=r"takes no text prompt; .*caption=\.\.\., caption_mask"):
        wordless.generate_images(prompt="a red circle")
    with pytest.raises(ValueError, match=r"prompt= and input_ids, attention_mask= both give"):
        fast().generate_images(prompt="a red circle", **tensors(TEXTS))
    with pytest.raises(ValueError, match="must be a text or a non-empty list of texts"):
        fast().generate_images(prompt=[["a"], 3])
    with pytest.raises(ValueError, match="unknown keyword processor for accelerate"):
        mmspec.accelerate(toys.model("llama"), "plain", processor=processors.janus())
