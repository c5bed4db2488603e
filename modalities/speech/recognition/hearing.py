"""From sounds to what a recogniser's `generate()` takes, by its own processor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoProcessor, FeatureExtractionMixin, ProcessorMixin

from mmspec import _hf
from mmspec.errors import described
from mmspec.modalities.speech.recognition import own_generate
from mmspec.modalities.speech.sound import Sound
from mmspec.models.loading import word_reader

ASKED = "can you transcribe the speech into a written format?"  # as Granite was trained to hear it
FEWEST, PER_SECOND = 32, 16  # tokens of a transcript, at most
SHORTEST_S = 0.1  # that features are made of, where nobody fills a window with silence
_EXTRACTORS = ("feature_extractor", "audio_processor")  # what processors call theirs


def processor_of(model: Any) -> Any:
    """The processor beside a model's weights. Raises ValueError where there is none."""
    return word_reader(model.config._name_or_path or None, AutoProcessor, "processor")


def extractor(processor: Any) -> Any:
    """What makes features. Raises ValueError for a processor that hears nothing."""
    if isinstance(processor, FeatureExtractionMixin):
        return processor
    held = vars(processor)
    found = next((held[name] for name in _EXTRACTORS if name in held), None)
    if found is None:
        raise ValueError(
            f"a {type(processor).__name__} makes no features of sounds; give processor= that of "
            "the recogniser"
        )
    return found


def rate_hz(processor: Any) -> int:
    """Samples a second that a processor's features are made of."""
    return int(extractor(processor).sampling_rate)


def window(processor: Any) -> float:
    """Seconds that are heard at once; infinite where a sound is heard whole."""
    made = extractor(processor)
    samples = vars(made).get("n_samples")
    return samples / made.sampling_rate if samples else float("inf")


def inputs(
    model: Any,
    processor: Any,
    sounds: Sequence[Sound],
    prompt: str | None = None,
    language: str | None = None,
) -> dict[str, Any]:
    """Tensors of a request, a row per sound, on the model's device and in its type.

    `prompt` is what a language model is asked; `language` is for those that are told it there.
    Raises ValueError for a prompt that is no text, or where nobody reads words, and for a sound
    that is too short to be heard whole.
    """
    rate = rate_hz(processor)
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"prompt={described(prompt)} is no text; give words")
    brief = min(sounds, key=lambda sound: sound.seconds)
    if brief.seconds < SHORTEST_S and window(processor) == float("inf"):
        raise ValueError(
            f"a sound of {brief.seconds:.4f} s is too short for {type(model).__name__}, which "
            f"hears sounds whole; give {SHORTEST_S:g} s at least, with silence around it"
        )
    waves = [sound.at(rate).samples.numpy() for sound in sounds]
    if model.config.is_encoder_decoder:
        if prompt is not None:
            raise ValueError(
                f"prompt={prompt!r}: {type(model).__name__} is asked nothing in words; drop it, or "
                "give prompt_ids= where it is Whisper"
            )
        made = _features(model, processor, waves, rate)
    else:
        made = _request(model, processor, waves, prompt, language)
        mask = made.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "the processor pads on the right, and a model writes behind its prompt; set "
                "processor.tokenizer.padding_side = 'left'"
            )
    names = _hf.forward_names(model)
    kept = {name: value for name, value in made.items() if name in names}
    return {name: _placed(value, model) for name, value in kept.items()}


def _features(model: Any, processor: Any, waves: list[Any], rate: int) -> Mapping[str, Any]:
    """Of an encoder-decoder; sounds longer than a window are told apart by a mask."""
    made, limit = extractor(processor), vars(extractor(processor)).get("n_samples")
    options: dict[str, Any] = {"sampling_rate": rate, "return_tensors": "pt"}
    if limit is None:
        return dict(made(waves, padding=True, return_attention_mask=True, **options))
    if max(map(len, waves)) <= limit:
        return dict(made(waves, **options))
    return dict(
        made(waves, truncation=False, padding="longest", return_attention_mask=True, **options)
    )


def _request(
    model: Any, processor: Any, waves: list[Any], prompt: str | None, language: str | None
) -> Mapping[str, Any]:
    """Of a language model that hears: as its processor asks for a transcript, or in its chat."""
    ask = getattr(processor, "apply_transcription_request", None)  # some processors have one
    if ask is not None:
        known = inspect.signature(ask).parameters
        told = {"language": language, "prompt": prompt}
        own = {"model_id": str(model.config._name_or_path)} if "model_id" in known else {}
        said = {name: one for name, one in told.items() if one is not None and name in known}
        return dict(ask(audio=waves, **said, **own))
    texts = [chat(processor, ASKED if prompt is None else prompt)] * len(waves)
    return dict(processor(text=texts, audio=waves, padding=True, return_tensors="pt"))


def chat(processor: Any, prompt: str) -> str:
    """One sound and words behind it, in the model's chat form where it has one."""
    template, mark = processor.chat_template, processor.audio_token
    if not template:
        return f"{mark}{prompt}"
    content: Any = f"{mark}{prompt}"
    if "'audio'" in str(template):
        content = [{"type": "audio"}, {"type": "text", "text": prompt}]
    turn = [{"role": "user", "content": content}]
    return str(processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False))


def _placed(value: Any, model: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(model.device, model.dtype if value.is_floating_point() else None)


def room(model: Any, sounds: Sequence[Sound]) -> dict[str, int]:
    """How much may be written where nobody says: all that Whisper has places for.

    Others get room for a quick speaker, since transformers' own limit is 20 tokens.
    """
    if own_generate.is_own(model):
        if model.generation_config.max_length is not None:
            return {}
        return {"max_length": int(model.config.max_target_positions)}
    longest = max(sound.seconds for sound in sounds)
    return {"max_new_tokens": FEWEST + int(PER_SECOND * longest)}


def words(processor: Any, tokens: Sequence[int]) -> str:
    """Tokens as text, without marks of language, task or time, by its tokenizer."""
    return str(tokenizer(processor).decode(tokens, skip_special_tokens=True)).strip()


def times(model: Any, sounds: Sequence[Sound], window: float, is_asked: bool) -> bool:
    """Whether Whisper marks times: where it is asked to, and to walk through a long sound.

    Raises ValueError for a checkpoint that has no such marks.
    """
    longest = max(one.seconds for one in sounds)
    if not is_asked and longest <= window:
        return False
    if vars(model.generation_config).get("no_timestamps_token_id") is None:
        what = "timestamps=True" if is_asked else f"a sound of {longest:.1f} s"
        raise ValueError(
            f"{what} needs marks of time, which this checkpoint has none of; give sounds of at "
            f"most {window:g} s without timestamps"
        )
    return True


def tokenizer(processor: Any) -> Any:
    """What reads and writes words. Raises ValueError for a processor that only hears."""
    found = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    if isinstance(found, FeatureExtractionMixin):
        raise ValueError(
            f"a {type(found).__name__} reads no words; give processor= the whole processor of the "
            "recogniser"
        )
    return found
