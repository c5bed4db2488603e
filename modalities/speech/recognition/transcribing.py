"""`transcribe`: sounds in, words out, whatever their number, length and rate.

Sounds that a recogniser hears at once are one batch, if it is greedy. A sound longer than Whisper's
window, one that is told what it said before, and one that is sampled, is asked by itself: its noise
is that of its place in the list, so no sound depends on what it came with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mmspec.errors import check_flag, refuse_fixed
from mmspec.modalities.speech.recognition import hearing, own_generate
from mmspec.modalities.speech.sound import Sound, sound
from mmspec.stats import Stats
from mmspec.targets.tokens.generation_settings import sampled

OURS = ("sampling_rate", "language", "task", "timestamps", "prompt", "row_ids")
TOLD = ("language", "task")
RETURNED = ("return_segments", "return_dict_in_generate", "output_scores", "output_logits")


@dataclass(frozen=True)
class Piece:
    """A stretch of speech between two marks of time."""

    start_seconds: float
    end_seconds: float
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Transcript:
    """What was said in one sound; `pieces` where Whisper marked times."""

    text: str
    tokens: list[int]  # new ones, as they were written; marks of time are among them
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Transcription:
    """What `transcribe` returns: a transcript per sound, and the run's own report."""

    transcripts: tuple[Transcript, ...]
    stats: Stats

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.transcripts]

    @property
    def text(self) -> str:
        """Of a single sound. Raises ValueError where there are several."""
        if len(self.transcripts) != 1:
            raise ValueError(f"there are {len(self.transcripts)} transcripts; read .texts")
        return self.transcripts[0].text


def transcribe(
    session: Any, args: Sequence[Any], arguments: Mapping[str, Any], loop: Any
) -> Transcription:
    """What is said in a sound, or in each of several.

    `audio` is a file, samples (n,) or (channels, n) at `sampling_rate`, or a list of these; samples
    are averaged over channels and resampled. `language` and `task` ("transcribe", "translate") are
    told to the model, of a list of languages one to each sound; without `language` Whisper detects
    it. `timestamps=True` has Whisper say when each piece was spoken. `prompt` is what a language
    model is asked. Everything else goes to `generate()`: `max_new_tokens`, `temperature` (a number,
    or several to fall back to), `seed`, and for Whisper `prompt_ids`, `forced_decoder_ids`,
    `condition_on_prev_tokens` and thresholds.
    Raises ValueError for what is no sound, and for what the model cannot be told.
    """
    given = dict(arguments)
    if len(args) > 1 or (args and "audio" in given) or not (args or "audio" in given):
        raise ValueError("transcribe() takes one sound or a list of them: transcribe(audio, ...)")
    audio = args[0] if args else given.pop("audio")
    own = {name: given.pop(name, None) for name in OURS}
    processor = session.processor or hearing.processor_of(session.model)
    rate, _ = hearing.rate_hz(processor), hearing.tokenizer(processor)
    sounds = [sound(one, own["sampling_rate"]).at(rate) for one in _several(audio)]
    _check_words(session.model, own)
    rows = range(len(sounds)) if own["row_ids"] is None else own["row_ids"]
    if len(rows) != len(sounds):
        raise ValueError(f"row_ids={list(rows)} are not one per sound, of which are {len(sounds)}")
    languages = own["language"]
    several = isinstance(languages, list | tuple)
    if several and len(languages) != len(sounds):
        raise ValueError(
            f"{len(sounds)} sounds have {len(languages)} languages; give one for all, or one each"
        )
    found: dict[int, Transcript] = {}
    is_drawn = _is_drawn(session.model, given)
    alone = is_drawn or _is_conditioned(session.model, given)
    for group in _groups(sounds, hearing.window(processor), alone):
        heard = [sounds[at] for at in group]
        told = {**own, "language": [languages[at] for at in group]} if several else own
        asked = _asked(session.model, processor, heard, told, given)
        drawn = {"row_ids": [rows[at] for at in group]} if is_drawn else {}
        answer = session.ask({**asked, **drawn}, loop)
        made = _written(session.model, processor, asked, answer)
        found |= dict(zip(group, made, strict=True))
    return Transcription(tuple(found[at] for at in range(len(sounds))), loop.stats())


def _several(audio: Any) -> list[Any]:
    """Sounds one by one. Raises ValueError for an empty list."""
    if not isinstance(audio, list | tuple):
        return [audio]
    if not audio:
        raise ValueError("the list of sounds is empty; give one at least")
    return list(audio) if any(map(_is_sound, audio)) else [audio]


def _is_sound(one: Any) -> bool:
    """Whether an element of a list is a sound, and not a sample."""
    named = isinstance(one, str | Path | Sound | Mapping | list | tuple)
    return named or (isinstance(one, Tensor | np.ndarray) and one.ndim > 0)


def _check_words(model: Any, own: Mapping[str, Any]) -> None:
    """Refuse what this model cannot be told. Raises ValueError."""
    if own["timestamps"] is not None:
        check_flag("timestamps", own["timestamps"])
    is_own = own_generate.is_own(model)
    for name in ("task", "timestamps"):
        if own[name] and not is_own:
            raise ValueError(
                f"{name}={own[name]!r} is told to Whisper, and this is a "
                f"{type(model).__name__}; drop it"
            )
    if own["language"] is not None and not is_own and model.config.is_encoder_decoder:
        raise ValueError(
            f"language={own['language']!r}: a {type(model).__name__} is told none; drop it"
        )


def _is_drawn(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether tokens may be sampled: at once, or at temperatures that are fallen back to."""
    temperature = given.get("temperature")
    if isinstance(temperature, list | tuple):
        return any(temperature)
    made = sampled({name: one for name, one in given.items() if one is not None})
    return bool(made.get("do_sample", model.generation_config.do_sample))


def _is_conditioned(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether Whisper is told what it wrote before: rows would have prompts of several lengths."""
    asked = given.get("condition_on_prev_tokens")
    if asked is None:
        asked = vars(given.get("generation_config") or model.generation_config).get(
            "condition_on_prev_tokens"
        )
    return bool(asked)


def _groups(sounds: Sequence[Sound], window: float, alone: bool) -> list[list[int]]:
    """Which sounds are asked together."""
    short = [at for at, one in enumerate(sounds) if one.seconds <= window and not alone]
    rest = [[at] for at in range(len(sounds)) if at not in short]
    return [*([short] if short else []), *rest]


def _asked(
    model: Any,
    processor: Any,
    heard: Sequence[Sound],
    own: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of `generate()`. Raises ValueError for what the sounds and the call say."""
    refuse_fixed(given, ("return_timestamps",), "transcribe()", "say timestamps=True")
    refuse_fixed(given, RETURNED, "transcribe()", "it returns transcripts; use generate()")
    limits = ("max_new_tokens", "max_length", "generation_config")
    is_limited = any(given.get(name) is not None for name in limits)
    room = {} if is_limited else hearing.room(model, heard)
    if not own_generate.is_own(model):
        made = hearing.inputs(model, processor, heard, own["prompt"], own["language"])
        _refuse_inputs(given, made)
        return {**made, **room, **given}
    made = hearing.inputs(model, processor, heard, own["prompt"])
    _refuse_inputs(given, made)
    told = {name: own[name] for name in TOLD if own[name] is not None}
    limit = hearing.window(processor)
    told |= {"return_timestamps": hearing.times(model, heard, limit, bool(own["timestamps"]))}
    return {**made, **room, **given, **told, "return_segments": True}


def _refuse_inputs(given: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    why = "the sounds are made into that; drop it, or use generate()"
    refuse_fixed(given, (*made, "encoder_outputs"), "transcribe()", why)


def _written(model: Any, processor: Any, asked: Mapping[str, Any], answer: Any) -> list[Transcript]:
    """A transcript per row."""
    if own_generate.is_own(model):
        timed = bool(asked.get("return_timestamps"))
        return [_of_segments(processor, row, timed) for row in answer.segments]
    length = 1 if model.config.is_encoder_decoder else asked["input_ids"].shape[1]
    rows = [_until_end(model, row) for row in answer.sequences[:, length:].tolist()]
    return [Transcript(hearing.words(processor, row), row) for row in rows]


def _of_segments(processor: Any, segments: Sequence[Mapping[str, Any]], timed: bool) -> Transcript:
    pieces = []
    for one in segments:
        tokens = one["tokens"].tolist()
        text = hearing.words(processor, tokens)
        pieces.append(Piece(float(one["start"]), float(one["end"]), text, tokens))
    every = [token for piece in pieces for token in piece.tokens]
    text = hearing.words(processor, every)
    return Transcript(text, every, tuple(pieces) if timed else ())


def _until_end(model: Any, row: list[int]) -> list[int]:
    ends = model.generation_config.eos_token_id
    final = {*ends} if isinstance(ends, list | tuple) else {ends}
    return row[: next((at for at, token in enumerate(row) if token in final), len(row))]
