"""`transcribe`: text from recordings of any number, length and sampling rate.

Recordings that fit into one window are one batch if decoding is greedy. A recording is processed
alone if it is longer than the window, conditioned on previous tokens, or sampled; its noise is that
of its position in the list, so a transcript does not depend on the other recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mmspec.errors import check_flag, refuse_fixed
from mmspec.modalities.common.audio_inputs import rate_hz, window_seconds
from mmspec.modalities.common.sound import Sound, sound
from mmspec.modalities.speech.recognition import inputs
from mmspec.modalities.speech.recognition.whisper_generate import has_whisper_generate
from mmspec.stats import Stats
from mmspec.targets.tokens.generation_settings import check_callables, infer_do_sample

OWN_ARGUMENTS = ("sampling_rate", "language", "task", "timestamps", "prompt", "row_ids")
WHISPER_ARGUMENTS = ("language", "task")
OUTPUT_FLAGS = ("return_segments", "return_dict_in_generate", "output_scores", "output_logits")


@dataclass(frozen=True)
class Piece:
    """A segment of speech between two timestamps."""

    start_seconds: float
    end_seconds: float
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Transcript:
    """The transcript of one recording; `pieces` if Whisper predicted timestamps."""

    text: str
    tokens: list[int]  # all new tokens, timestamps included
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Transcription:
    """What `transcribe` returns: a transcript per recording, and statistics of the run."""

    transcripts: tuple[Transcript, ...]
    stats: Stats

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.transcripts]

    @property
    def text(self) -> str:
        """The text of a single recording. Raises ValueError if there are several."""
        if len(self.transcripts) != 1:
            raise ValueError(f"there are {len(self.transcripts)} transcripts; read .texts")
        return self.transcripts[0].text


def transcribe(
    session: Any, args: Sequence[Any], arguments: Mapping[str, Any], loop: Any
) -> Transcription:
    """Transcribe one recording or a list of them; arguments as of `AcceleratedRecogniser`.

    Raises ValueError for what is no recording, and for options that the model does not have.
    """
    given = dict(arguments)
    if len(args) > 1 or (args and "audio" in given) or not (args or "audio" in given):
        raise ValueError(
            "transcribe() takes one recording or a list of them; give it: transcribe(audio, ...)"
        )
    audio = args[0] if args else given.pop("audio")
    check_callables(given)
    own = {name: given.pop(name, None) for name in OWN_ARGUMENTS}
    processor = session.processor or inputs.load_model_processor(session.model)
    rate, _ = rate_hz(processor), inputs.tokenizer(processor)
    sounds = [sound(one, own["sampling_rate"]).at(rate) for one in _list_sounds(audio)]
    _check_options(session.model, own)
    rows = range(len(sounds)) if own["row_ids"] is None else own["row_ids"]
    if len(rows) != len(sounds):
        raise ValueError(f"row_ids={list(rows)} must be one per recording, {len(sounds)} in all")
    languages = own["language"]
    several = isinstance(languages, list | tuple)
    if several and len(languages) != len(sounds):
        raise ValueError(
            f"{len(sounds)} recordings have {len(languages)} languages; give one for all, or one "
            "each"
        )
    found: dict[int, Transcript] = {}
    is_sampled = _is_sampled(session.model, given)
    is_single = is_sampled or _is_conditioned(session.model, given)
    for group in _group_sounds(sounds, window_seconds(processor), is_single):
        batch = [sounds[at] for at in group]
        options = {**own, "language": [languages[at] for at in group]} if several else own
        request = _prepare_arguments(session.model, processor, batch, options, given)
        noise = {"row_ids": [rows[at] for at in group]} if is_sampled else {}
        output = session.generate({**request, **noise}, loop)
        transcripts = _read_transcripts(session.model, processor, request, output)
        found |= dict(zip(group, transcripts, strict=True))
    return Transcription(tuple(found[at] for at in range(len(sounds))), loop.stats())


def _list_sounds(audio: Any) -> list[Any]:
    """Make a list of recordings. Raises ValueError for an empty list."""
    if not isinstance(audio, list | tuple):
        return [audio]
    if not audio:
        raise ValueError("the list of recordings is empty; give one at least")
    return list(audio) if any(map(_is_sound, audio)) else [audio]


def _is_sound(one: Any) -> bool:
    """Whether an element of a list is a recording, and not a sample."""
    if isinstance(one, str | Path | Sound | Mapping | list | tuple):
        return True
    return isinstance(one, Tensor | np.ndarray) and one.ndim > 0


def _check_options(model: Any, own: Mapping[str, Any]) -> None:
    """Raises ValueError for options that the model does not have."""
    if own["timestamps"] is not None:
        check_flag("timestamps", own["timestamps"])
    is_own = has_whisper_generate(model)
    for name in ("task", "timestamps"):
        if own[name] not in (None, False) and not is_own:
            raise ValueError(
                f"{name}={own[name]!r} is an option of Whisper, and this is a "
                f"{type(model).__name__}; drop it"
            )
    if own["language"] is not None and not is_own and model.config.is_encoder_decoder:
        raise ValueError(
            f"language={own['language']!r}: a {type(model).__name__} takes no language; drop it"
        )


def _is_sampled(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether tokens may be sampled, at the first or at a fallback temperature."""
    temperature = given.get("temperature")
    if isinstance(temperature, list | tuple):
        return any(temperature)
    made = infer_do_sample({name: one for name, one in given.items() if one is not None})
    return bool(made.get("do_sample", model.generation_config.do_sample))


def _is_conditioned(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether Whisper conditions on previous tokens, so that prompts differ in length."""
    is_conditioned = given.get("condition_on_prev_tokens")
    if is_conditioned is None:
        config = given.get("generation_config") or model.generation_config
        is_conditioned = vars(config).get("condition_on_prev_tokens")
    if is_conditioned is not None:
        check_flag("condition_on_prev_tokens", is_conditioned)
    return bool(is_conditioned)


def _group_sounds(sounds: Sequence[Sound], window: float, is_single: bool) -> list[list[int]]:
    """The batches: all short recordings, then each long one alone."""
    short = [at for at, one in enumerate(sounds) if one.seconds <= window and not is_single]
    rest = [[at] for at in range(len(sounds)) if at not in short]
    return [*([short] if short else []), *rest]


def _prepare_arguments(
    model: Any,
    processor: Any,
    sounds: Sequence[Sound],
    own: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of `generate()`. Raises ValueError for arguments that are fixed here."""
    refuse_fixed(given, ("return_timestamps",), "transcribe()", "give timestamps=True")
    refuse_fixed(given, OUTPUT_FLAGS, "transcribe()", "it returns transcripts; use generate()")
    limits = ("max_new_tokens", "max_length", "generation_config")
    is_limited = any(given.get(name) is not None for name in limits)
    length = {} if is_limited else inputs.default_length(model, sounds)
    if not has_whisper_generate(model):
        made = inputs.prepare_inputs(model, processor, sounds, own["prompt"], own["language"])
        _refuse_inputs(given, made)
        return {**made, **length, **given}
    made = inputs.prepare_inputs(model, processor, sounds, own["prompt"])
    _refuse_inputs(given, made)
    options = {name: own[name] for name in WHISPER_ARGUMENTS if own[name] is not None}
    window = window_seconds(processor)
    is_timed = inputs.needs_timestamps(model, sounds, window, bool(own["timestamps"]))
    options |= {"return_timestamps": is_timed}
    return {**made, **length, **given, **options, "return_segments": True}


def _refuse_inputs(given: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    why = "it is computed from the recordings; drop it, or use generate()"
    refuse_fixed(given, (*made, "encoder_outputs"), "transcribe()", why)


def _read_transcripts(
    model: Any, processor: Any, request: Mapping[str, Any], output: Any
) -> list[Transcript]:
    """A transcript per row."""
    if has_whisper_generate(model):
        is_timed = bool(request.get("return_timestamps"))
        return [_join_segments(processor, row, is_timed) for row in output.segments]
    length = 1 if model.config.is_encoder_decoder else request["input_ids"].shape[1]
    rows = [_cut_at_end(model, row) for row in output.sequences[:, length:].tolist()]
    return [Transcript(inputs.decode(processor, row), row) for row in rows]


def _join_segments(
    processor: Any, segments: Sequence[Mapping[str, Any]], is_timed: bool
) -> Transcript:
    pieces = []
    for one in segments:
        tokens = one["tokens"].tolist()
        text = inputs.decode(processor, tokens)
        pieces.append(Piece(float(one["start"]), float(one["end"]), text, tokens))
    every = [token for piece in pieces for token in piece.tokens]
    text = inputs.decode(processor, every)
    return Transcript(text, every, tuple(pieces) if is_timed else ())


def _cut_at_end(model: Any, row: list[int]) -> list[int]:
    ends = model.generation_config.eos_token_id
    final = {*ends} if isinstance(ends, list | tuple) else {ends}
    return row[: next((at for at, token in enumerate(row) if token in final), len(row))]
