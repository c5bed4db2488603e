"""Argument names of transformers' scripts, and `model.generate` itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import GenerationConfig

import mmspec
from mmspec.modalities.image import families as image
from tests.covering import limited
from tests.modalities import drawing
from tests.toys import image_models, processors

BATCH = 2
NEGATIVES = {"ids": "input_ids", "attention_mask": "attention_mask"}


@lru_cache(maxsize=8)
def fast(family: str, recipe: str = "sjd") -> Any:
    processor = processors.emu3() if family == "emu3" else None
    return mmspec.accelerate(image_models.PAINTERS[family](), recipe, processor=processor)


def emu3_script() -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of Emu3's documented script, and the same with the names used here."""
    made = processors.emu3()(
        text=["a red circle", "a blue square"],
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_for_image_generation=True,
        ratio="3:2",
        image_area=6 * processors.emu3().downsample_ratio ** 2,
    )
    inputs = {name: made[name] for name in ("input_ids", "attention_mask", "image_sizes")}
    negative = image_models.pad_prompts([[1, 30, 31, 9], [1, 40, 9]])
    theirs = inputs | {
        "guidance_scale": 2.0,
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    ours = {name: made[name] for name in ("input_ids", "attention_mask")}
    return theirs, ours | {"grid": (2, 3), "guidance": 2.0, "negative": negative}


def allowed_of(start: int) -> Any:
    grid = drawing.grid_of("emu3", image.image_family(image_models.emu3()))

    def allowed(_: int, ids: Tensor) -> list[int]:
        forced = grid.forced_token(len(ids) - start)
        codes: list[int] = grid.ids().tolist()
        return codes if forced is None else [forced]

    return {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": grid.length}


def test_emu3_s_documented_names_are_taken() -> None:
    theirs, ours = emu3_script()
    how = {"temperature": 1.0, "seed": 3}
    found = fast("emu3").generate_images(**theirs, **how)
    assert torch.equal(found.sequences, fast("emu3").generate_images(**ours, **how).sequences)
    assert found.ids.shape == (BATCH, 2, 3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"guidance": 3.0}, r"guidance_scale= and guidance= set the same option"),
        ({"image_sizes": [[2, 3], [3, 2]]}, "images of one call have one size"),
        ({"negative_prompt_ids": None}, "negative_prompt_ids=, which is missing"),
        ({"image_sizes": []}, r"image_sizes=\[\] are not one size"),
        ({"image_sizes": {}}, r"image_sizes=\{\} are not one size"),
        ({"image_sizes": torch.ones(1, 3)}, r"image_sizes=float32 \(1, 3\) are not one size"),
        ({"num_return_sequences": 0}, "num_return_sequences=0 must be a whole number of at least"),
        (
            {
                "negative_prompt_ids": None,
                "negative_prompt_attention_mask": None,
                "negative": {"input_ids": torch.tensor([[1, 9]]), "pixel_values": torch.ones(1)},
            },
            "negative: .*pixel_values.*input_ids",
        ),
    ],
)
def test_names_that_contradict_each_other_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fast("emu3").generate_images(**{**emu3_script()[0], **more})


@pytest.mark.parametrize("family", limited(image_models.PAINTERS, 3))
def test_several_images_per_prompt(family: str) -> None:
    """Copies are adjacent, as in `generate()`; rows do not depend on their batch."""
    given, how = (
        image_models.request(family, BATCH),
        {"temperature": 1.0, "seed": 5, "guidance": 2.0},
    )
    how |= drawing.sized(family)
    found = fast(family).generate_images(**given, **how, num_return_sequences=2).sequences
    twice: dict[str, Any] = {
        name: {key: each.repeat_interleave(2, 0) for key, each in value.items()}
        if isinstance(value, dict)
        else value.repeat_interleave(2, 0)
        for name, value in given.items()
    }
    assert torch.equal(found, fast(family).generate_images(**twice, **how).sequences)
    counted = {"num_return_sequences": np.int64(2)}
    assert torch.equal(fast(family).generate_images(**given, **how, **counted).sequences, found)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("family", ["emu3", "janus", "chameleon"])
def test_one_unconditional_prompt_serves_a_batch(family: str) -> None:
    given, how = image_models.request(family, 3), {"guidance": 2.0, **drawing.sized(family)}
    one = image_models.pad_prompts([[1, 30, 31, image_models.BOI]])
    given["negative"] = one
    found = fast(family).generate_images(**given, **how).sequences
    given["negative"] = {name: value.expand(3, -1) for name, value in one.items()}
    assert torch.equal(found, fast(family).generate_images(**given, **how).sequences)
    given["negative"] = {name: value.expand(2, -1) for name, value in one.items()}
    with pytest.raises(ValueError, match="3 prompts have 2 unconditional ones; give one for all"):
        fast(family).generate_images(**given, **how)


@pytest.mark.parametrize("negative", [True, False], ids=["negative prompt", "last token"])
def test_emu3_is_guided_in_generate_too(negative: bool) -> None:
    """The documented script, with `custom_generate` and by our own `generate`."""
    theirs, _ = emu3_script()
    theirs = {**theirs, **allowed_of(theirs["input_ids"].shape[1]), "do_sample": False}
    del theirs["image_sizes"]
    if not negative:
        del theirs["negative_prompt_ids"], theirs["negative_prompt_attention_mask"]
    model = fast("emu3").model
    wanted = model.generate(**theirs)
    assert not torch.equal(wanted, model.generate(**{**theirs, "guidance_scale": None}))
    assert torch.equal(model.generate(**theirs, custom_generate=fast("emu3")), wanted)
    assert torch.equal(fast("emu3").generate(**theirs).sequences, wanted)


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.4},
        {"encoder_repetition_penalty": 2.0},
        {"exponential_decay_length_penalty": (3, 1.5)},
    ],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_see_the_guided_scores_of_generate(penalty: dict[str, Any]) -> None:
    """They depend on the sign of a score: those of `generate()` are log-probabilities."""
    model = fast("emu3").model
    given = image_models.request("emu3", BATCH)
    del given["negative"]
    how: dict[str, Any] = {"guidance_scale": 3.0, "max_new_tokens": 12, "do_sample": False}
    wanted = model.generate(**given, **how, **penalty)
    assert torch.equal(fast("emu3").generate(**given, **how, **penalty).sequences, wanted)
    how |= {"output_scores": True, "return_dict_in_generate": True}
    theirs, ours = (one.generate(**given, **how, **penalty) for one in (model, fast("emu3")))
    assert_close(torch.stack(ours.scores), torch.stack(theirs.scores), atol=1e-3, rtol=1e-4)


def test_a_configured_scale_guides_generate() -> None:
    model, given = image_models.emu3(), image_models.request("emu3", BATCH)
    negative = given.pop("negative")
    quick = mmspec.accelerate(model, "sjd")
    how = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 2}
    config = GenerationConfig(guidance_scale=3.0, **how)
    guided = model.generate(**given, generation_config=config)
    assert torch.equal(quick.generate(**given, generation_config=config).sequences, guided)
    model.generation_config.update(guidance_scale=3.0)
    plain = model.generate(**given, **how, guidance_scale=1.0)
    assert not torch.equal(plain, guided)
    assert torch.equal(quick.generate(**given, **how).sequences, guided)
    for off in (1.0, None):
        assert torch.equal(quick.generate(**given, **how, guidance_scale=off).sequences, plain)
    how |= {f"negative_prompt_{name}": negative[f"{old}"] for name, old in NEGATIVES.items()}
    assert torch.equal(quick.generate(**given, **how).sequences, model.generate(**given, **how))


def test_unsupported_guidance_is_refused() -> None:
    quick, given = fast("emu3"), image_models.request("emu3", 1)
    del given["negative"]
    with pytest.raises(ValueError, match=r"output_logits.*unguided.*output_scores"):
        quick.generate(**given, guidance_scale=3.0, output_logits=True, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"output_logits.*unguided.*output_scores"):
        quick.model.generate(
            **given, guidance_scale=3.0, output_logits=True, max_new_tokens=3, custom_generate=quick
        )
    embeds = quick.model.get_input_embeddings()(given["input_ids"])
    with pytest.raises(ValueError, match=r"guidance_scale=3.0.*inputs_embeds.*input_ids"):
        quick.generate(inputs_embeds=embeds, guidance_scale=3.0)
    with pytest.raises(ValueError, match="guidance_scale='x'"):
        quick.generate(**given, guidance_scale="x")


def test_guidance_takes_no_position_ids() -> None:
    theirs, _ = emu3_script()
    places = theirs["attention_mask"].cumsum(-1).clamp_min(1) - 1
    theirs = {**theirs, **allowed_of(places.shape[1]), "position_ids": places, "do_sample": False}
    del theirs["image_sizes"]
    with pytest.raises(ValueError, match=r"position_ids.*guidance reads two"):
        fast("emu3").generate(**theirs)
    places += 1  # else they are those that generate() makes
    with pytest.raises(ValueError, match=r"position_ids.*guidance reads two"):
        fast("emu3").model.generate(**theirs, custom_generate=fast("emu3"))


def test_janus_under_custom_generate_is_refused() -> None:
    """Its own loop takes no custom one, and text generation is not supported."""
    quick, given = fast("janus"), image_models.request("janus", 1)
    with pytest.raises(ValueError, match="custom_generate"):
        quick.model.generate(**given, generation_mode="image", custom_generate=quick)
    with pytest.raises(ValueError, match=r"call generate_images\(\)"):
        quick.model.generate(**given, custom_generate=quick)
