"""Generation settings: refused with an error, or honoured as in `generate()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, StopStringCriteria, WatermarkingConfig

import mmspec
from mmspec import _hf
from tests import toys
from tests.targets.tokens.test_outcome import assert_steps, ends
from tests.toys.processors import byte_tokenizer

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
    "use_cache": False,
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
    monkeypatch.setattr(_hf, "get_default_config", lambda: later)
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
        extra["tokenizer"] = words = byte_tokenizer()
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
