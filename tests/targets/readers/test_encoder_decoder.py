"""Encoder-decoder models: first decoder tokens and encoder inputs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import mmspec
from mmspec.modalities.vlm import survey
from tests.covering import covering

NEW: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
IDS = torch.randint(5, 30, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
WORDS: dict[str, Any] = {"input_ids": IDS * MASK, "attention_mask": MASK}
OTHER = {"decoder_input_ids": torch.tensor([[7, 8], [9, 7]])}  # without the start token
NAMES = ("BartForConditionalGeneration", "T5ForConditionalGeneration")


@lru_cache(maxsize=4)
def model(name: str) -> Any:
    return survey.build(name)


def own(name: str, **request: Any) -> Tensor:
    found: Tensor = model(name).generate(**request)
    return found


def assert_same(name: str, **request: Any) -> None:
    expected = own(name, **request)
    fast: Any = mmspec.accelerate(model(name), "prompt-lookup")
    assert fast.generate(**request).sequences.tolist() == expected.tolist()
    assert own(name, **request, custom_generate=fast).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "more"),
    covering(
        NAMES,
        [
            {"decoder_start_token_id": 7},
            {"decoder_start_token_id": [7, 8]},
            {"generation_config": GenerationConfig(decoder_start_token_id=7)},
            OTHER,
            {**OTHER, "decoder_start_token_id": 6},
            {"decoder_input_ids": torch.tensor([[1, 8], [1, 7]])},
            {"decoder_start_token_id": 7, "decoder_attention_mask": torch.ones(2, 1)},
        ],
        strength=1,
    ),
    ids=str,
)
def test_a_decoder_begins_as_generate_has_it_begin(name: str, more: dict[str, Any]) -> None:
    assert_same(name, **WORDS, **NEW, **more)


@pytest.mark.parametrize("name", NAMES)
def test_decoder_tokens_that_some_rows_lack_are_refused(name: str) -> None:
    request = {**WORDS, **OTHER, "decoder_attention_mask": torch.tensor([[1, 1], [0, 1]])}
    fast: Any = mmspec.accelerate(model(name), "prompt-lookup")
    for ask in (fast.generate, lambda **given: own(name, **given, custom_generate=fast)):
        with pytest.raises(ValueError, match="decoder_attention_mask hides tokens of some rows"):
            ask(**request, **NEW)


@pytest.mark.parametrize(
    ("name", "penalty"),
    [
        *((name, {"encoder_repetition_penalty": 3.0}) for name in NAMES),
        ("BartForConditionalGeneration", {"encoder_no_repeat_ngram_size": 1}),
    ],
)
def test_encoder_penalties_go_by_the_source(name: str, penalty: dict[str, Any]) -> None:
    assert own(name, **WORDS, **NEW).tolist() != own(name, **WORDS, **NEW, **penalty).tolist()
    assert_same(name, **WORDS, **NEW, **penalty)


@pytest.mark.parametrize("name", NAMES)
def test_a_source_may_be_embedded_or_encoded_already(name: str) -> None:
    made = model(name)
    with torch.no_grad():
        embeds = made.get_input_embeddings()(WORDS["input_ids"])
        encoded = made.get_encoder()(**WORDS)
    assert_same(name, inputs_embeds=embeds, attention_mask=MASK, **NEW)
    assert_same(name, encoder_outputs=encoded, attention_mask=MASK, **NEW)
    fast: Any = mmspec.accelerate(made, "prompt-lookup")
    both = fast.generate(encoder_outputs=encoded, **WORDS, **NEW).sequences
    assert both.tolist() == own(name, **WORDS, **NEW).tolist()  # the ids are the source's, not ours


def test_several_pictures_of_a_prompt_are_one_row() -> None:
    name = "Florence2ForConditionalGeneration"
    made = model(name)
    count = 17  # features of a picture
    ids = torch.tensor([[5, *[made.config.image_token_id] * (2 * count), 8, 9]])
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    request = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
    expected = own(name, **request, **NEW)
    assert len(expected) == 1
    assert_same(name, **request, **NEW)


def test_a_picture_may_be_the_whole_source() -> None:
    """As of TrOCR and Donut; inside transformers' own `generate()`, too, which encodes it."""
    vision = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
    )
    text = transformers.TrOCRConfig(
        vocab_size=90,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: Any = transformers.VisionEncoderDecoderModel(config).eval()
    made.generation_config = GenerationConfig(decoder_start_token_id=1, pad_token_id=0)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    fast: Any = mmspec.accelerate(made, "prompt-lookup")
    for more in ({}, OTHER, {"input_ids": OTHER["decoder_input_ids"]}):
        expected = made.generate(pixel_values=pixels, **more, **NEW)
        out = fast.generate(pixel_values=pixels, **more, **NEW).sequences
        inside = made.generate(pixel_values=pixels, **more, **NEW, custom_generate=fast)
        assert out.tolist() == inside.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "saw"),
    [*((name, "prompt") for name in NAMES), ("T5Gemma2ForConditionalGeneration", "pixels")],
)
def test_a_draft_model_with_an_encoder_reads_the_source(name: str, saw: str) -> None:
    """A model that drafts for itself is always right: one call for the prompt, then five tokens."""
    made = model(name)
    expected = own(name, **WORDS, **NEW)
    for more in ({}, {"sees": saw}):
        fast: Any = mmspec.accelerate(made, "coupled", drafter=made, length=4, **more)
        out = fast.generate(**WORDS, **NEW)
        assert out.sequences.tolist() == expected.tolist()
        assert (out.stats.drafter_saw, out.stats.target_calls) == (saw, 2)
