"""The private parts of transformers that mmspec leans on behave alike in 5.23 and 5.24."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import mmspec
from mmspec import _hf
from mmspec.modalities.common.tiny_models import tiny_llama
from mmspec.modalities.speech.frames import tiny_models as frames
from mmspec.targets.stop import Stop
from tests import toys
from tests.toys import readers as families

CPU = torch.device("cpu")
PROMPT = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 5]])
MASK = (PROMPT != 0).long()


@pytest.fixture
def model() -> Any:
    made = tiny_llama(16, layers=1)
    made.generation_config.eos_token_id = 3
    return made


def resolved(model: Any, **settings: Any) -> hf.GenerationConfig:
    config = _hf.merge_config(model, None, settings)
    _hf.set_special_tokens(model, config, CPU, 2, True)
    return _hf.set_lengths(
        model,
        config,
        4,
        default_max="max_length" not in settings,
        default_min="min_length" not in settings,
    )


def test_default_config_lists_the_settings() -> None:
    known = _hf.get_default_config().to_dict()
    assert {"do_sample", "temperature", "top_k", "top_p", "stop_strings", "max_time"} <= set(known)


def test_merge_config_ranks_settings_config_model_and_defaults(model: Any) -> None:
    model.generation_config.top_k = 7
    model.generation_config.top_p = 0.5
    given = hf.GenerationConfig(top_p=0.6, temperature=0.7)
    merged = _hf.merge_config(model, given, {"temperature": 0.8})
    assert (merged.temperature, merged.top_p, merged.top_k) == (0.8, 0.6, 7)
    assert merged.do_sample is False
    assert given.temperature == 0.7
    assert model.generation_config.temperature is None


def test_set_special_tokens_writes_the_tensors_that_processors_read(model: Any) -> None:
    config = _hf.merge_config(model, None, {"eos_token_id": [3, 4]})
    _hf.set_special_tokens(model, config, CPU, 2, True)
    assert config._eos_token_tensor.tolist() == [3, 4]  # type: ignore[union-attr]
    assert config._pad_token_tensor.item() == 0  # type: ignore[union-attr]
    assert _hf.eos_ids(config) == {3, 4}


def test_eos_ids_reads_an_unprepared_config_too() -> None:
    assert _hf.eos_ids(hf.GenerationConfig(eos_token_id=5)) == {5}
    assert _hf.eos_ids(hf.GenerationConfig()) == frozenset()


def test_decoder_prompt_begins_with_the_start_token_of_each_row() -> None:
    sizes: dict[str, Any] = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    heads: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.BartConfig(vocab_size=16, **sizes, **heads, decoder_start_token_id=2)
    model: Any = hf.BartForConditionalGeneration(config)
    given = torch.tensor([[5, 6], [7, 8]])

    def prompt(tokens: Tensor | None, **settings: Any) -> list[list[int]]:
        config = _hf.merge_config(model, None, settings)
        found: list[list[int]] = _hf.make_decoder_prompt(model, config, tokens, 2, CPU).tolist()
        return found

    assert prompt(None) == [[2], [2]]
    assert prompt(None, decoder_start_token_id=[3, 4]) == [[3], [4]]
    assert prompt(given) == [[2, 5, 6], [2, 7, 8]]
    assert prompt(given, decoder_start_token_id=[5, 7]) == given.tolist()


def test_encoded_names_are_those_that_picture_encoders_take(model: Any) -> None:
    assert not _hf.encoder_input_names(model)
    assert {"pixel_values", "vision_feature_layer"} <= _hf.encoder_input_names(toys.model("llava"))
    assert _hf.encoder_input_names(toys.model("qwen2_5_vl")) >= {
        *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
    }


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, (24, 0)),
        ({"max_new_tokens": 3, "min_new_tokens": 2}, (7, 6)),
        ({"max_length": 9, "min_length": 5}, (9, 5)),
    ],
    ids=str,
)
def test_set_lengths_makes_them_absolute(model: Any, settings: Any, want: Any) -> None:
    config = resolved(model, **settings)
    assert (config.max_length, config.min_length) == want


def test_logits_processors_come_in_the_known_order(model: Any) -> None:
    own = hf.SuppressTokensLogitsProcessor([2])
    config = resolved(
        model,
        do_sample=True,
        repetition_penalty=1.1,
        encoder_repetition_penalty=1.1,
        no_repeat_ngram_size=2,
        min_new_tokens=2,
        remove_invalid_values=True,
        temperature=0.5,
        top_h=0.5,
        top_k=4,
        top_p=0.5,
        min_p=0.1,
        typical_p=0.5,
        epsilon_cutoff=0.1,
        eta_cutoff=0.1,
        renormalize_logits=True,
    )
    made = _hf.make_logits_processors(
        model,
        config,
        4,
        CPU,
        inputs=PROMPT,
        attention_mask=MASK,
        extra=[own],
        prefix_allowed_tokens_fn=lambda row, ids: [row],
    )
    assert [type(processor).__name__ for processor in made] == [
        "EncoderRepetitionPenaltyLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "LogitNormalization",
    ]
    assert own in made
    penalty = made[1]
    assert penalty.prompt_ignore_length.tolist() == [2, 0]


def test_bind_row_asks_about_that_row_only() -> Any:
    asked: list[tuple[int, list[int]]] = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        asked.append((row, ids.tolist()))
        return [2]

    bound = _hf.bind_row(hf.PrefixConstrainedLogitsProcessor(allowed, 1), 5)
    scores = bound(torch.tensor([[7, 8]]), torch.zeros(1, 4))
    assert scores.isfinite().tolist() == [[False, False, True, False]]
    assert asked == [(5, [7, 8])]


def test_stopping_criteria_are_those_of_generate(model: Any) -> None:
    class _Own(hf.StoppingCriteria):
        pass

    own = _Own()
    config = resolved(model, max_new_tokens=3, max_time=9.0, eos_token_id=[3, 4])
    made = _hf.make_stopping_criteria(model, config, [own])
    kinds = ["MaxLengthCriteria", "MaxTimeCriteria", "EosTokenCriteria", "_Own"]
    assert [type(criterion).__name__ for criterion in made] == kinds
    stop = Stop.resolve(model, config, 4, [own])
    assert (stop.max_new_tokens, stop.eos, stop.max_time) == (3, {3, 4}, 9.0)  # type: ignore[comparison-overlap]
    assert stop.criteria == (own,)
    with pytest.raises(ValueError, match="tokenizer"):
        _hf.make_stopping_criteria(model, resolved(model, stop_strings=["a"]))


def test_prefill_inputs_count_positions_behind_the_padding(model: Any) -> None:
    cache = hf.DynamicCache(config=model.config)
    made = _hf.prepare_prefill_inputs(model, {"input_ids": PROMPT, "attention_mask": MASK}, cache)
    assert made["position_ids"][:, -2:].tolist() == [[0, 1], [2, 3]]
    assert made[_hf.cache_name(model)] is cache
    assert torch.equal(made["input_ids"], PROMPT)
    assert torch.equal(made["attention_mask"], MASK)


@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_prompt_positions_are_those_of_a_prefill(family: str) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=2, ragged=True)
    found = _hf.make_prompt_positions(model, request)
    prepared = _hf.prepare_prefill_inputs(model, request, None)["position_ids"]
    assert found.dim() == (3 if family == "qwen2_5_vl" else 2)
    assert torch.equal(found, prepared)


@pytest.mark.parametrize("batch", [{}, {"batch": 2, "ragged": True}], ids=["one", "ragged"])
@pytest.mark.parametrize("family", ["llama", "llava", "qwen2_5_vl"])
def test_places_by_itself_tells_places_of_generate_from_those_of_a_user(
    family: str, batch: Any
) -> None:
    """Made without the pictures that a hook names, and for as long a mask as there is."""
    model, request, found = toys.model(family), toys.inputs(family, **batch), list[bool]()

    def hook(
        model: Any,
        input_ids: Tensor,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        **rest: Any,
    ) -> Tensor:
        inputs = {**rest, **request, "past_key_values": None}
        found.append(
            _hf.position_ids_are_generated(model, inputs, {"pixel_values", "image_grid_thw"})
        )
        return input_ids

    model.generate(**request, max_new_tokens=2, custom_generate=hook)
    places = request["attention_mask"].cumsum(-1)
    model.generate(**request, position_ids=places, max_new_tokens=2, custom_generate=hook)
    assert found == [True, False]


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "whisper", "qwen3_5"])
def test_a_compiled_model_takes_what_the_model_takes(family: str) -> None:
    """torch.compile hides its arguments, and what cannot be seen is not refused as missing."""
    model = toys.model(family)
    compiled = torch.compile(model, backend="eager")
    assert _hf.forward_names(compiled) == _hf.forward_names(model)
    assert "attention_mask" in _hf.forward_names(model)
    families.backbone(compiled)


@pytest.mark.exhaustive
def test_a_compiled_model_hands_out_its_features() -> None:
    model, request = toys.model("llava"), toys.inputs("llava")
    expected = model.generate(**request, max_new_tokens=6, do_sample=False)
    fast = mmspec.accelerate(
        torch.compile(model, backend="eager"), drafter=toys.model("llama"), sees="target-features"
    )
    out = fast.generate(**request, max_new_tokens=6, do_sample=False)
    assert torch.equal(out.sequences, expected)


def test_inferred_mask_is_told_by_padding_that_ends_nothing(model: Any) -> None:
    mask = _hf.infer_mask(model, PROMPT)
    assert mask is not None
    assert torch.equal(mask, MASK)
    assert _hf.infer_mask(model, PROMPT[1:]) is None  # nothing is padded
    model.generation_config.eos_token_id = [3, 0]
    assert _hf.infer_mask(model, PROMPT) is None  # it also ends a sequence
    model.generation_config.eos_token_id = 3
    assert _hf.infer_mask(model, PROMPT, resolved(model, pad_token_id=7)) is not None


@torch.no_grad()
def test_encode_source_is_what_the_encoder_makes() -> None:
    model, request = toys.model("whisper"), toys.inputs("whisper")
    made = _hf.encode_source(model, request).last_hidden_state
    assert torch.equal(made, model.get_encoder()(**request).last_hidden_state)


@torch.no_grad()
def test_a_guided_text_has_a_null_text_below() -> None:
    model, ids = frames.musicgen(), torch.tensor([[4, 5, 6]])
    states, mask = _hf.encode_guided_text(model, {"input_ids": ids}, 3.0)
    own = model.text_encoder(input_ids=ids).last_hidden_state
    assert torch.equal(states, torch.cat((own, torch.zeros_like(own))))
    assert mask.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert torch.equal(_hf.encode_guided_text(model, {"input_ids": ids}, 1.0)[0], own)


@torch.no_grad()
def test_text_and_chroma_stand_before_a_melody() -> None:
    model, ids = frames.melody(), torch.tensor([[4, 5, 6]])
    states, _ = _hf.encode_melody(model, {"input_ids": ids}, 3.0)
    text = model.text_encoder(input_ids=ids).last_hidden_state
    assert states.shape[:2] == (2, 3 + text.shape[1])  # three of chroma
    assert torch.equal(states[0, 3:], text[0])
    assert not bool(states[1, 3:].any())


@torch.no_grad()
def test_encode_media_turns_pixels_into_the_encoders_own_output() -> None:
    vlm, request = toys.model("llava"), toys.inputs("llava")
    made = _hf.encode_media(vlm, request)
    assert "pixel_values" not in made
    assert torch.equal(made["input_ids"], request["input_ids"])
    own = vlm.model.get_image_features(pixel_values=request["pixel_values"], return_dict=True)
    given = made["mm_encoder_outputs"]["image"].pooler_output
    assert torch.equal(torch.cat(list(given)), torch.cat(list(own.pooler_output)))


def test_a_prompt_of_one_token_has_a_row_per_picture() -> None:
    vlm = toys.model("llava")
    made = _hf.make_bos_prompt(vlm, hf.GenerationConfig(bos_token_id=3), {"pixel_values": None})
    assert made.tolist() == [[3]]
    pixels = torch.zeros(2, 3, 16, 16)
    made = _hf.make_bos_prompt(vlm, hf.GenerationConfig(bos_token_id=3), {"pixel_values": pixels})
    assert made.tolist() == [[3], [3]]


def test_the_hook_leaves_arguments_alone_that_the_callable_names() -> None:
    vlm, request = toys.model("llava"), toys.inputs("llava")
    seen: dict[str, Any] = {}

    def hook(model: Any, input_ids: Tensor, pixel_values: Any = None, **rest: Any) -> Tensor:
        seen.update(rest, pixel_values=pixel_values)
        return input_ids

    vlm.generate(**request, max_new_tokens=2, custom_generate=hook)
    assert seen["pixel_values"] is request["pixel_values"]
    assert not seen.get("mm_encoder_outputs")
