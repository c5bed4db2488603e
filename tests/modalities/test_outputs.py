"""What `generate()` returns beside tokens: its scores, logits and cache, or one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, StopStringCriteria, WatermarkingConfig

import mmspec
from mmspec import _hf
from mmspec.drafters.oracle import Oracle
from mmspec.trees import Tree
from tests import toys
from tests.modalities.test_turns import BATCHES, assert_same_cache
from tests.toys.speaking import bytewise

ROOM = 10
ASKED: dict[str, Any] = {
    "max_new_tokens": ROOM,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}
SHAPES: dict[str, Any] = {"chain": 3, "tree": Tree.branching([2, 2, 1])}
Request = dict[str, Any]


def ends(model: Any, request: Request) -> int:
    """An id that ends the first row early."""
    said = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    return int(said[0, request["input_ids"].shape[1] + 4])


def assert_steps(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("batch", ["one", "ragged"])
@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", "tree"), ("qwen2_5_vl", "chain"), ("lfm2", "chain")],
)
def test_scores_and_logits_are_those_of_generate(family: str, batch: str, shape: str) -> None:
    """Also of rows that have ended, which `generate()` reads on over padding."""
    model, request = toys.model(family), toys.inputs(family, **BATCHES[batch])
    settings = {
        **ASKED,
        "do_sample": False,
        "repetition_penalty": 1.3,
        "eos_token_id": ends(model, request),
    }
    expected = model.generate(**request, **settings)
    rows = expected.sequences[:, request["input_ids"].shape[1] :].tolist()
    drafter = Oracle(rows, 0.5, tree=SHAPES[shape], seed=1)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter)
    inside = model.generate(**request, **settings, custom_generate=fast)
    assert type(inside) is type(expected)
    for out in (fast.generate(**request, **settings), inside):
        assert torch.equal(out.sequences, expected.sequences)
        assert_steps(out.scores, expected.scores)
        assert_steps(out.logits, expected.logits)
        assert_same_cache(out.past_key_values, expected.past_key_values)


@pytest.mark.parametrize("renormalize", [False, True])
def test_sampled_scores_are_warped_as_generate_warps_them(renormalize: bool) -> None:
    """Its draws are others, so each row of scores is made again from the logits."""
    model, request = toys.model("llama"), toys.inputs("llama", batch=2, ragged=True)
    settings = {**ASKED, "do_sample": True, "temperature": 0.7, "top_k": 9}
    settings["renormalize_logits"] = renormalize
    out = mmspec.accelerate(model, "prompt-lookup").generate(**request, **settings, seed=3)
    for logits, scores in zip(out.logits, out.scores, strict=True):
        warm = logits / 0.7
        kept = warm >= warm.topk(9).values[:, -1:]
        expected = warm.masked_fill(~kept, -torch.inf)
        expected = expected.log_softmax(-1) if renormalize else expected
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    width = request["input_ids"].shape[1]
    own = model(out.sequences, attention_mask=whole(request, out.sequences)).logits
    assert_steps(out.logits, own[:, width - 1 : -1].float().unbind(1))


def whole(request: Request, sequences: Tensor) -> Tensor:
    mask = torch.ones_like(sequences)
    mask[:, : request["input_ids"].shape[1]] = request["attention_mask"]
    return mask


def test_scores_of_an_encoder_decoder() -> None:
    model, request = toys.model("whisper"), toys.inputs("whisper", batch=2)
    expected = model.generate(**request, **ASKED, do_sample=False)
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**request, **ASKED, do_sample=False)
    assert_steps(out.scores, expected.scores)
    assert out.past_key_values is None


def test_what_was_not_asked_for_is_not_there() -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    out = fast.generate(**request, max_new_tokens=4, output_logits=True)
    assert (out.scores, out.past_key_values) == (None, None)
    assert len(out.logits) == 4
    assert isinstance(model.generate(**request, max_new_tokens=4, custom_generate=fast), Tensor)


def test_a_gate_that_skips_has_no_scores() -> None:
    gated = [name for name in mmspec.recipes.names() if mmspec.recipes.get(name).gate is not None]
    texts = [name for name in gated if mmspec.recipes.get(name).decodes == "tokens"]
    model = toys.model("llama")
    for name in texts:
        recipe = mmspec.recipes.get(name)
        if recipe.takes_drafter or recipe.hears:
            continue
        fast = mmspec.accelerate(model, recipe)
        with pytest.raises(ValueError, match=r"output_scores.*gate.*choose another"):
            fast.generate(**toys.inputs("llama"), **ASKED)


# Every field of a GenerationConfig: a value that asks for something, and whether it is refused.
REFUSED: dict[str, Any] = {
    "assistant_early_exit": 1,
    "cache_config": {"backend": "quanto"},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": [1],
    "continuous_batching_config": "unused",
    "dola_layers": "high",
    "force_words_ids": [[5]],
    "guidance_scale": 2.0,
    "is_assistant": True,
    "max_cache_len": 64,
    "num_beam_groups": 2,
    "num_beams": 2,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 4,
    "prompt_lookup_num_tokens": 3,
    "token_healing": True,
    "use_mtp": True,
}
TAKEN: dict[str, Any] = {
    "assistant_confidence_threshold": 0.9,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "bad_words_ids": [[30], [31, 32]],
    "begin_suppress_tokens": [20, 21],
    "bos_token_id": 3,
    "decoder_start_token_id": 3,
    "disable_compile": True,
    "diversity_penalty": None,
    "do_sample": False,
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "eos_token_id": [40, 41],
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "exponential_decay_length_penalty": (2, 1.5),  # towards the end of sequence
    "forced_bos_token_id": 12,
    "forced_eos_token_id": 13,
    "length_penalty": 2.0,
    "low_memory": True,
    "max_length": 45,
    "max_matching_ngram_size": 2,
    "max_new_tokens": 5,
    "max_time": 100.0,
    "min_length": 38,
    "min_new_tokens": 5,
    "min_p": 0.1,
    "no_repeat_ngram_size": 2,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic",
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 2,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.4,
    "return_dict_in_generate": False,
    "sequence_bias": [[[50], 5.0]],
    "speculation_type": "unused",
    "stop_strings": None,  # what the first row says
    "suppress_tokens": [22, 23],
    "target_lookbehind": 3,
    "temperature": 0.8,
    "top_h": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "transformers_version": "4.0.0",
    "typical_p": 0.9,
    "use_cache": False,
    "watermarking_config": WatermarkingConfig(bias=4.0),
}
SAMPLED = ("min_p", "top_h", "top_k", "top_p", "typical_p", "temperature", "epsilon_cutoff")


def test_every_setting_of_the_installed_transformers_is_decided_upon() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields == REFUSED.keys() | TAKEN.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_honoured_is_refused(name: str) -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    config = GenerationConfig(max_new_tokens=4, do_sample=name == "num_return_sequences")
    setattr(config, name, REFUSED[name])
    way_out = "(drop|pass|use|give|accelerate|choose|heal)"
    with pytest.raises(ValueError, match=rf"{name}=.*(not supported|speculated).*{way_out}"):
        fast.generate(**request, generation_config=config)
    with pytest.raises(ValueError, match=name.replace("_", ".")):  # transformers may say it first
        model.generate(**request, generation_config=config, custom_generate=fast)


def test_a_setting_of_tomorrow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a later transformers adds would be ignored, also in the model's own settings."""
    model, request = toys.model("llama"), toys.inputs("llama")
    fast = mmspec.accelerate(model, "prompt-lookup")
    config = GenerationConfig(max_new_tokens=4)
    setattr(config, "tomorrow", 3)  # noqa: B010
    with pytest.raises(ValueError, match="tomorrow is not a generation setting"):
        fast.generate(**request, generation_config=config)
    later = GenerationConfig()
    setattr(later, "tomorrow", None)  # noqa: B010
    monkeypatch.setattr(_hf, "default_config", lambda: later)
    with pytest.raises(ValueError, match="tomorrow=3 is not known here"):
        fast.generate(**request, generation_config=config)
    with pytest.raises(ValueError, match="tomorrow=3 is not known here"):
        model.generate(**request, generation_config=config, custom_generate=fast)
    model.generation_config.tomorrow = 3
    with pytest.raises(ValueError, match="tomorrow=3 is not known here"):
        fast.generate(**request, max_new_tokens=4)
    monkeypatch.undo()  # an entry of the model's own, as Whisper's, is nobody's to read
    assert fast.generate(**request, max_new_tokens=4).sequences.shape[1] > 4


@pytest.mark.parametrize("name", TAKEN)
def test_a_setting_that_is_taken_does_what_it_does_in_generate(name: str) -> None:
    """Greedily token for token; settings of sampling by the scores that they leave."""
    model, request = toys.model("llama", layers=3), toys.inputs("llama", batch=2, ragged=True)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, name: TAKEN[name]}
    if name == "exponential_decay_length_penalty":
        settings["eos_token_id"] = 40
    if name == "max_length":
        del settings["max_new_tokens"]
    extra: dict[str, Any] = {}
    if name == "stop_strings":
        extra["tokenizer"] = words = bytewise()
        settings[name] = [words.decode([ends(model, request)])]
    fast = mmspec.accelerate(model, "prompt-lookup")
    if name in (*SAMPLED, "eta_cutoff"):
        settings |= {"do_sample": True, "max_new_tokens": 1}
        settings |= {"return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**request, **settings, **extra)
    config = GenerationConfig(**settings)
    inner: dict[str, Any] = {"generation_config": config}
    if extra:  # transformers keeps the tokenizer to itself, so a hook's stop strings come as a rule
        rule = StopStringCriteria(extra["tokenizer"], settings[name])
        inner = {"max_new_tokens": 8, "do_sample": False, "stopping_criteria": [rule]}
    inside = model.generate(**request, **inner, custom_generate=fast)
    out = fast.generate(**request, generation_config=config, **extra)
    if settings.get("output_scores") and settings["do_sample"]:
        assert_steps(out.scores, expected.scores)
        assert_steps(inside.scores, expected.scores)
        return
    assert torch.equal(out.sequences, expected)
    assert torch.equal(inside, expected)
