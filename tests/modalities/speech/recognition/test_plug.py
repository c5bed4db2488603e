"""Recognisers beside Whisper: padded sounds, language models that hear, and whose they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf

import mmspec
from mmspec import registry
from mmspec.modalities.speech import owns_recogniser
from mmspec.modalities.vlm.survey import build
from mmspec.modality import Source
from mmspec.models.loading import random_model
from tests import toys
from tests.modalities.speech.recognisers import tokenizer
from tests.toys import granite

ROOM = 16


def moonshine(seed: int = 0) -> Any:
    config = hf.MoonshineConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
    )
    return random_model(lambda: hf.MoonshineForConditionalGeneration(config), seed)


def test_the_padding_of_a_sound_is_not_heard() -> None:
    model, mask = moonshine(), torch.ones(2, 8000, dtype=torch.int64)
    mask[1, 3000:] = 0
    generator = torch.Generator().manual_seed(0)
    sounds = torch.randn(2, 8000, generator=generator) * mask
    request = {"input_values": sounds, "attention_mask": mask}
    how: dict[str, Any] = {"max_new_tokens": ROOM, "do_sample": False}
    expected = model.generate(**request, **how)
    unmasked = model.generate(input_values=sounds, **how)
    assert not torch.equal(expected, unmasked)
    for drafter in (None, moonshine()):
        recipe = "prompt-lookup" if drafter is None else "whisper-assisted"
        fast = mmspec.accelerate(model, recipe, drafter=drafter)
        assert torch.equal(fast.generate(**request, **how).sequences, expected)
        hooked = model.generate(**request, **how, custom_generate=fast)
        assert torch.equal(hooked, expected)


def test_what_is_too_short_to_be_heard_whole_is_refused() -> None:
    extractor = hf.Wav2Vec2FeatureExtractor(do_normalize=False)
    reader = hf.Wav2Vec2Processor(extractor, tokenizer())
    fast = mmspec.accelerate(moonshine(), "prompt-lookup", processor=reader)
    for short in (torch.ones(1), [torch.zeros(8000), torch.zeros(1500)]):
        with pytest.raises(ValueError, match=r"of 0\.\d+ s is too short .* 0\.1 s at least"):
            fast.transcribe(short, sampling_rate=16000)
    with pytest.raises(ValueError, match="prompt=5 must be a string"):
        fast.transcribe(torch.zeros(8000), sampling_rate=16000, prompt=5)


def test_a_draft_model_that_grows_no_tree_is_refused_for_its_own_reason() -> None:
    config = hf.Speech2TextConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, decoder_start_token_id=2
    )
    models = [random_model(lambda: hf.Speech2TextForConditionalGeneration(config), 0)] * 2
    with pytest.raises(ValueError, match=r"takes no decoder_position_ids.*drafts chains only"):
        mmspec.accelerate(models[0], "whisper-assisted", drafter=models[1])
    assert mmspec.accelerate(models[0], "coupled", drafter=models[1])


OWNED = {
    "WhisperForConditionalGeneration": True,
    "MoonshineForConditionalGeneration": True,
    "GraniteSpeechForConditionalGeneration": True,
    "Qwen2AudioForConditionalGeneration": True,
    "VoxtralForConditionalGeneration": True,
    "Speech2TextForConditionalGeneration": True,
    "WhisperForCausalLM": False,  # a decoder alone hears nothing
    "Qwen2_5OmniThinkerForConditionalGeneration": False,  # sees, too
    "MusicgenForConditionalGeneration": False,  # is heard
    "LlavaForConditionalGeneration": False,
    "Wav2Vec2ForCTC": False,  # writes frame by frame
}


@pytest.mark.parametrize("name", OWNED)
def test_whose_a_class_is(name: str) -> None:
    bases = tuple(base.__name__ for base in getattr(hf, name).__mro__)
    assert owns_recogniser(Source(None, "any", bases)) is OWNED[name]
    assert owns_recogniser(Source("folder", "any", (name,))) is OWNED[name]


def test_a_model_object_is_the_recognisers() -> None:
    assert registry.find_modality(toys.model("whisper")).name == "asr"
    assert registry.find_modality(toys.model("llama")).name == "vlm"
    assert not registry.get("asr").owns(registry.describe("openai/whisper-tiny"))


def test_a_model_that_takes_no_language_says_so() -> None:
    fast = mmspec.accelerate("zoo:granite-speech", "plain")
    for language in ("xx", "", ["en"]):
        with pytest.raises(ValueError, match=r"language=.* takes no language; .* in prompt="):
            fast.transcribe(torch.zeros(8000), sampling_rate=16000, language=language)
    with pytest.raises(ValueError, match="task='' is an option of Whisper"):
        fast.transcribe(torch.zeros(8000), sampling_rate=16000, task="")


def test_a_model_that_generates_no_tokens_is_refused() -> None:
    """SpeechT5 predicts spectrograms, by a `generate()` without the loop of transformers."""
    with torch.device("meta"):
        model = hf.SpeechT5ForTextToSpeech(hf.SpeechT5Config(encoder_layers=1, decoder_layers=1))
    with pytest.raises(ValueError, match=r"SpeechT5ForTextToSpeech.generate\(\) is its own"):
        mmspec.accelerate(model)


def test_granite_switches_its_adapters_by_what_it_is_asked(monkeypatch: Any) -> None:
    """Its own `generate()` does: they are for sound, and off where there is text alone."""
    model, told = build("GraniteSpeechForConditionalGeneration"), list[bool]()
    monkeypatch.setattr(model, "_hf_peft_config_loaded", True, raising=False)
    monkeypatch.setattr(model, "enable_adapters", lambda: told.append(True))
    monkeypatch.setattr(model, "disable_adapters", lambda: told.append(False))
    fast = mmspec.accelerate(model, "prompt-lookup")
    fast.generate(input_ids=torch.tensor([[7, 9, 12, 9]]), max_new_tokens=2, do_sample=False)
    assert told == [False]


def test_granite_is_sampled_by_the_distribution_of_its_language_model() -> None:
    """transformers leaves its logits undivided by `logits_scaling`; we divide, as Granite does."""
    model = build("GraniteSpeechForConditionalGeneration")
    model.config.text_config.logits_scaling = 7.0
    asked = {"input_ids": torch.tensor([[7, 9, 12, 9]]), "max_new_tokens": 4, "output_logits": True}
    own = model.generate(**asked, do_sample=False, return_dict_in_generate=True)
    ours = mmspec.accelerate(model, "prompt-lookup").generate(**asked, do_sample=False)
    for mine, theirs in zip(ours.logits, own.logits, strict=True):
        torch.testing.assert_close(mine, theirs / 7, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("windows", [(3,), (3, 2)])
def test_granite_drafts_for_granite_from_the_sound(windows: tuple[int, ...]) -> None:
    """The mask of its features stays what it is in the dtype of the draft model."""
    target = granite.model()
    fast = mmspec.accelerate(target, "coupled", drafter=copy.deepcopy(target), sees="pixels")
    request = {**granite.inputs(windows), "max_new_tokens": 12, "do_sample": False}
    out = fast.generate(**request)
    assert out.stats.fallback is None
    assert out.stats.draft_acceptance_rate == 1  # it is the target itself
    assert torch.equal(out.sequences, target.generate(**request))
