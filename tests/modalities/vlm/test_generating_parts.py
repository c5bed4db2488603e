"""Models whose generate() calls that of a submodule: BLIP-2, InstructBLIP, Kosmos-2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmspec
from mmspec.models.loading import random_model

IMAGE, QUERIES, NEW = 98, 4, 14
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QFORMER: dict[str, Any] = {**VISION, "vocab_size": 100, "encoder_hidden_size": 16}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
SIZES: dict[str, dict[str, Any]] = {
    "OPT": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "word_embed_proj_dim": 32}
    | {"num_attention_heads": 2, "max_position_embeddings": 128},
    "T5": {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    | {"decoder_start_token_id": 0},
    "Kosmos2Text": {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 2}
    | {"max_position_embeddings": 128},
}


def _text(kind: str) -> dict[str, Any]:
    return {"vocab_size": 100, **SIZES[kind], **ENDS}


def _blip(kind: str, words: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vision_config=VISION,
        qformer_config=QFORMER,
        text_config=getattr(transformers, f"{words}Config")(**_text(words)).to_dict(),
        num_query_tokens=QUERIES,
        image_token_index=IMAGE,
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def _kosmos() -> Any:
    config = transformers.Kosmos2Config(
        text_config=_text("Kosmos2Text"),
        vision_config=VISION,
        latent_query_num=QUERIES,
        tie_word_embeddings=False,
    )
    maker: Any = transformers.Kosmos2ForConditionalGeneration
    return maker(config)


BUILDERS = {
    "blip-2, opt": lambda: _blip("Blip2", "OPT"),
    "blip-2, t5": lambda: _blip("Blip2", "T5"),
    "instructblip, opt": lambda: _blip("InstructBlip", "OPT"),
    "instructblip, t5": lambda: _blip("InstructBlip", "T5"),
    "kosmos-2": _kosmos,
}


@pytest.fixture(params=BUILDERS, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    model = random_model(BUILDERS[name], 3)
    for part in model.modules():
        if isinstance(part, transformers.GenerationMixin):
            part.generation_config.eos_token_id = None
    return model


def make_request(name: str, batch: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Rows of different lengths, padded on the left, each with a picture of its own."""
    noise = torch.Generator().manual_seed(seed)
    before = [1, 97] if name == "kosmos-2" else [1]
    rows = [[*before, *[IMAGE] * QUERIES, 96, *([5, 6, 7] * (2 + row)), 5] for row in range(batch)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    given = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    given["pixel_values"] = torch.randn(batch, 3, 28, 28, generator=noise)
    if name == "kosmos-2":
        given["image_embeds_position_mask"] = (ids == IMAGE).long()
    if name.startswith("instructblip"):
        given["qformer_input_ids"] = torch.tensor([[3, 4, 5]]).repeat(batch, 1)
    return given


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_greedy_output_is_that_of_generate(model: Any, name: str, batch: int) -> None:
    request = make_request(name, batch)
    expected = model.generate(**request, max_new_tokens=NEW, do_sample=False)
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**request, max_new_tokens=NEW)
    assert torch.equal(out.sequences, expected)
    assert out.stats.fallback is None
    assert fast.model is model
    hooked = model.generate(**request, max_new_tokens=NEW, custom_generate=fast)
    assert torch.equal(hooked, expected)


def test_pictures_matter(model: Any, name: str) -> None:
    fast = mmspec.accelerate(model, "prompt-lookup")
    one, other = (
        fast.generate(**make_request(name, seed=seed), max_new_tokens=NEW).sequences
        for seed in (0, 1)
    )
    assert not torch.equal(one, other)


def test_seeded_samples_are_those_of_plain_decoding(model: Any, name: str) -> None:
    request = make_request(name, 2)
    drawn = {"max_new_tokens": NEW, "temperature": 1.2}
    fast = mmspec.accelerate(model, "prompt-lookup")
    first, second = (fast.generate(**request, **drawn, seed=seed).sequences for seed in (1, 2))
    plain = mmspec.decode_plain(model, **request, **drawn, seed=1)
    assert torch.equal(first, plain.sequences)
    assert not torch.equal(first, second)


def test_rounds_are_handed_out(model: Any, name: str) -> None:
    request = make_request(name)
    fast = mmspec.accelerate(model, "prompt-lookup")
    expected = fast.generate(**request, max_new_tokens=NEW).sequences[0, -NEW:].tolist()
    said = [
        token for turn in fast.stream(**request, max_new_tokens=NEW) for token in turn.tokens[0]
    ]
    assert said == expected


@pytest.mark.parametrize(
    "given", [{"row_ids": [4]}, {"past_key_values": transformers.DynamicCache()}]
)
def test_what_cannot_pass_through_the_model_is_refused(
    model: Any, name: str, given: dict[str, Any]
) -> None:
    fast = mmspec.accelerate(model, "prompt-lookup")
    with pytest.raises(ValueError, match=f"{next(iter(given))} cannot be given"):
        fast.generate(**make_request(name), **given, max_new_tokens=NEW)


def test_a_mask_is_looked_at_before_the_model_encodes_it(model: Any, name: str) -> None:
    fast, request = mmspec.accelerate(model, "prompt-lookup"), make_request(name, 2)
    with pytest.raises(ValueError, match="attention_mask holds 2"):
        fast.generate(**{**request, "attention_mask": 2 * request["attention_mask"]})


def test_a_submodule_that_was_not_called_is_detected(
    model: Any, name: str, monkeypatch: Any
) -> None:
    fast = mmspec.accelerate(model, "prompt-lookup")
    monkeypatch.setattr(model, "generate", lambda **_: torch.zeros(1, 1))
    with pytest.raises(ValueError, match="0 times instead of once"):
        fast.generate(**make_request(name), max_new_tokens=NEW)


def test_the_words_of_blip_are_refused_by_the_check() -> None:
    """The class masks a block of several tokens otherwise than its own steps."""
    text = {**QFORMER, **ENDS, "max_position_embeddings": 64, "sep_token_id": 2}
    config = transformers.BlipConfig(vision_config=VISION, text_config=text)
    maker: Any = transformers.BlipForConditionalGeneration
    model = random_model(lambda: maker(config), 3)
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    with pytest.raises(ValueError, match="BlipTextLMHeadModel scores a chain of drafted tokens"):
        mmspec.accelerate(model, "prompt-lookup").generate(
            input_ids=ids, pixel_values=torch.randn(1, 3, 28, 28), max_new_tokens=NEW
        )
