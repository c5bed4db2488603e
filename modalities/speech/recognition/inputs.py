"""Prepare the inputs of `generate()` from audio, with the processor of a recogniser."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoProcessor, FeatureExtractionMixin, ProcessorMixin

from mmspec import _hf
from mmspec.errors import format_value
from mmspec.modalities.common.audio_inputs import (
    check_windows,
    feature_extractor,
    rate_hz,
    window_seconds,
)
from mmspec.modalities.common.chat_template import apply_chat_template
from mmspec.modalities.common.sound import Sound
from mmspec.modalities.speech.recognition.whisper_generate import has_whisper_generate
from mmspec.models.loading import load_text_processor

DEFAULT_PROMPT = "can you transcribe the speech into a written format?"  # Granite's training prompt
MIN_TOKENS, TOKENS_PER_SECOND = 32, 16  # default length of a transcript
MIN_SECONDS = 0.1  # of audio that is not padded to a window


def load_model_processor(model: Any) -> Any:
    """Load the processor from the folder of the weights. Raises ValueError if there is none."""
    return load_text_processor(model.config._name_or_path or None, AutoProcessor, "processor")


def prepare_inputs(
    model: Any,
    processor: Any,
    sounds: Sequence[Sound],
    prompt: str | None = None,
    language: str | None = None,
) -> dict[str, Any]:
    """Tensors of a request, a row per recording, with the device and dtype of the model.

    `prompt` and `language` are those of speech language models. Raises ValueError for a prompt
    that is no text or that the model does not take, and for audio that is too short.
    """
    rate = rate_hz(processor)
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt={format_value(prompt)} must be a string; give one")
    brief = min(sounds, key=lambda sound: sound.seconds)
    if brief.seconds < MIN_SECONDS and window_seconds(processor) == float("inf"):
        raise ValueError(
            f"a recording of {brief.seconds:.4f} s is too short for {type(model).__name__}, which "
            f"does not pad to a window; give {MIN_SECONDS:g} s at least, padded with silence"
        )
    waves = [sound.at(rate).samples.numpy() for sound in sounds]
    if model.config.is_encoder_decoder:
        if prompt is not None:
            raise ValueError(
                f"prompt={format_value(prompt)}: {type(model).__name__} takes no text prompt; drop "
                "it, or give prompt_ids= for Whisper"
            )
        made = _extract_features(model, processor, waves, rate)
    else:
        made = _apply_processor(model, processor, waves, prompt, language)
        check_windows(processor, sounds, made)
        mask = made.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "the processor pads on the right, and generation continues the prompt; set "
                "processor.tokenizer.padding_side = 'left'"
            )
    names = _hf.forward_names(model)
    accepted = {name: value for name, value in made.items() if name in names}
    return {name: _move_to_model(value, model) for name, value in accepted.items()}


def _extract_features(model: Any, processor: Any, waves: list[Any], rate: int) -> Mapping[str, Any]:
    """Features for an encoder-decoder; a mask is added for audio longer than a window."""
    made, limit = feature_extractor(processor), vars(feature_extractor(processor)).get("n_samples")
    options: dict[str, Any] = {"sampling_rate": rate, "return_tensors": "pt"}
    if limit is None:
        return dict(made(waves, padding=True, return_attention_mask=True, **options))
    if max(map(len, waves)) <= limit:
        return dict(made(waves, **options))
    return dict(
        made(waves, truncation=False, padding="longest", return_attention_mask=True, **options)
    )


def _apply_processor(
    model: Any, processor: Any, waves: list[Any], prompt: str | None, language: str | None
) -> Mapping[str, Any]:
    """For a speech language model: its own transcription request, or a chat prompt."""
    make_request = getattr(processor, "apply_transcription_request", None)  # some processors
    known = inspect.signature(make_request).parameters if make_request else ("prompt",)
    given = {"language": language, "prompt": prompt}
    given = {name: one for name, one in given.items() if one is not None}
    for name in given:
        if name not in known:
            raise ValueError(
                f"{name}={format_value(given[name])}: a {type(model).__name__} takes no {name}; "
                "drop it" + (", or ask for the language in prompt=" if "prompt" in known else "")
            )
    if make_request is not None:
        own = {"model_id": str(model.config._name_or_path)} if "model_id" in known else {}
        return dict(make_request(audio=waves, **given, **own))
    texts = [format_prompt(processor, DEFAULT_PROMPT if prompt is None else prompt)] * len(waves)
    return dict(processor(text=texts, audio=waves, padding=True, return_tensors="pt"))


def format_prompt(processor: Any, prompt: str) -> str:
    """An audio token and a prompt, in the model's chat template if it has one."""
    template, mark = processor.chat_template, processor.audio_token
    if not template:
        return f"{mark}{prompt}"
    content: Any = f"{mark}{prompt}"
    if "'audio'" in str(template):
        content = [{"type": "audio"}, {"type": "text", "text": prompt}]
    turn = [{"role": "user", "content": content}]
    return str(apply_chat_template(processor, turn, add_generation_prompt=True, tokenize=False))


def _move_to_model(value: Any, model: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


def default_length(model: Any, sounds: Sequence[Sound]) -> dict[str, int]:
    """The default length: all decoder positions of Whisper, else in proportion to the audio.

    The default of transformers is 20 tokens.
    """
    if has_whisper_generate(model):
        if model.generation_config.max_length is not None:
            return {}
        return {"max_length": int(model.config.max_target_positions)}
    longest = max(sound.seconds for sound in sounds)
    return {"max_new_tokens": MIN_TOKENS + int(TOKENS_PER_SECOND * longest)}


def decode(processor: Any, tokens: Sequence[int]) -> str:
    """Decode tokens without special tokens (language, task, timestamps)."""
    return str(tokenizer(processor).decode(tokens, skip_special_tokens=True)).strip()


def needs_timestamps(
    model: Any, sounds: Sequence[Sound], window: float, is_requested: bool
) -> bool:
    """Whether Whisper predicts timestamps: on request, and for audio longer than a window.

    Raises ValueError for a checkpoint without timestamp tokens.
    """
    longest = max(one.seconds for one in sounds)
    if not is_requested and longest <= window:
        return False
    if vars(model.generation_config).get("no_timestamps_token_id") is None:
        cause = "timestamps=True" if is_requested else f"a recording of {longest:.1f} s"
        raise ValueError(
            f"{cause} needs timestamp tokens, which this checkpoint lacks; give recordings of at "
            f"most {window:g} s without timestamps"
        )
    return True


def tokenizer(processor: Any) -> Any:
    """The tokenizer of a processor. Raises ValueError for a feature extractor alone."""
    found = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    if isinstance(found, FeatureExtractionMixin):
        raise ValueError(
            f"a {type(found).__name__} has no tokenizer; give processor= the complete processor of "
            "the recogniser"
        )
    return found
