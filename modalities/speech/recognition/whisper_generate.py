"""Whisper's own `generate()` around our loop.

It sets language, task and timestamps, walks through long audio window by window, and retries at
higher temperatures when text repeats. It calls the decoding loop of transformers once per window
and temperature; that loop is replaced by ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from mmspec import _hf, _hf_cache
from mmspec.draft import Draft, Round
from mmspec.errors import check_flag, check_number, format_value
from mmspec.modalities.common.text_generation import TextGenerator
from mmspec.modality import Call, Loop
from mmspec.stats import Stats
from mmspec.targets.tokens.generation_settings import check_values, infer_do_sample

# options that the loop does not support, with the alternative
UNSUPPORTED = {
    "return_token_timestamps": "token timestamps need the attention of single steps, and a forward "
    "here reads several; give return_timestamps=True, which times segments",
    "streamer": "stream() returns tokens as they are accepted",
    "past_key_values": "each window is prefilled completely",
    "num_beams": "beam search is not supported",
    "assistant_model": "give the draft model to accelerate(model, drafter=...)",
}


# of a fallback to the next temperature, with the values of the Whisper paper
THRESHOLDS = {
    "compression_ratio_threshold": 2.4,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}


@dataclass(frozen=True)
class WhisperOutput:
    """The output of Whisper's `generate()`, with statistics of the run."""

    sequences: Tensor  # (B, T) without prompt
    stats: Stats
    segments: list[list[dict[str, Any]]] | None = None  # per row; start and end in seconds
    scores: tuple[Tensor, ...] | None = None  # (B, V) per new token, if requested
    logits: tuple[Tensor, ...] | None = None
    past_key_values: None = None  # never returned
    rounds: tuple[int, ...] = ()  # tokens of each round, of all rows and windows


def has_whisper_generate(model: Any) -> bool:
    """Whether a model's `generate()` does more than the loop of transformers."""
    return isinstance(_hf.unwrap_compiled(model), WhisperGenerationMixin)


def generate(text: TextGenerator, arguments: Mapping[str, Any], loop: Loop) -> WhisperOutput:
    """Run `model.generate(**arguments)` with our loop in place of that of transformers.

    The n-th window or temperature of a request samples with `seed + n`. Raises ValueError for
    arguments that are not supported.
    """
    model = text.bound.model
    given = {name: one for name, one in arguments.items() if one is not None}
    for name, why in UNSUPPORTED.items():
        if name in given and not (isinstance(given[name], Real) and given[name] in (0, 1)):
            raise ValueError(f"{name}={format_value(given[name])}: {why}; drop it")
    if given.get("input_features") is None and given.get("encoder_outputs") is None:
        raise ValueError("there is no audio; give input_features, as returned by the processor")
    _check_language(model, given)
    _check_fallback(model, given)
    forced = given.pop("forced_decoder_ids", None)
    if forced is not None:
        given["generation_config"] = _config_with_forced_ids(model, forced, given)
    text.check({name: one for name, one in given.items() if name in text.inputs})
    own = {name: given.pop(name, None) for name in ("seed", "row_ids")}
    own["drafter_inputs"] = given.pop("drafter_inputs", None)
    counted = _RoundCounter(loop)
    with cache_encoder(model) as cached:
        hook = _WindowHook(text, counted, cached, own)
        found = model.generate(
            **_hf_cache.name_cache(_normalize_sampling(given)), custom_generate=hook
        )
    report: dict[str, Any] = {"stats": loop.stats(), "rounds": tuple(counted.rounds)}
    if isinstance(found, Tensor):
        return WhisperOutput(found, **report)
    rest = {name: found.get(name) for name in ("segments", "scores", "logits")}
    return WhisperOutput(found["sequences"], **report, **rest)


class _RoundCounter:
    """A loop that records the number of tokens accepted in each round."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.rounds = loop, list[int]()

    @property
    def is_watched(self) -> bool:
        return self.loop.is_watched

    def __call__(self, call: Call) -> Iterator[Round]:
        for round_ in self.loop(call):
            self.rounds.append(sum(map(len, round_.tokens)))
            yield round_

    def stats(self) -> Stats:
        return self.loop.stats()

    def report(self, stats: Stats) -> None:
        self.loop.report(stats)

    def show(self, round_: Round, draft: Draft, states: Any) -> None:
        self.loop.show(round_, draft, states)


class _WindowHook:
    """The `custom_generate` hook, called for every window at every temperature."""

    def __init__(
        self, text: TextGenerator, loop: Loop, cached: EncoderCache, own: Mapping[str, Any]
    ) -> None:
        self.text, self.loop, self.cached, self.own, self.count = text, loop, cached, own, 0
        self.__signature__ = text.signature  # inspected by transformers

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        seed, rows = self.own["seed"], self.own["row_ids"]
        if rows is not None and len(rows) != len(args[1]):
            raise ValueError(
                f"row_ids={list(rows)}, but Whisper continues with {len(args[1])} of these rows; "
                "generate row by row, as transcribe() does"
            )
        drafts = self.own["drafter_inputs"]
        if drafts is None and self.text.bound.drafter.reads_prompt:
            drafts = {"input_features": self.cached.features}
        given = {
            "seed": None if seed is None else seed + self.count,
            "row_ids": rows,
            "drafter_inputs": drafts,
        }
        self.count += 1
        return self.text.hook(args, {**arguments, **given}, self.loop)


def _normalize_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Sampling arguments as `generate` here takes them; lists of temperatures stay as they are."""
    if isinstance(given.get("temperature"), list | tuple):
        return given
    made = infer_do_sample(given)  # Whisper samples only if a temperature is given
    usual = 1.0 if made.get("do_sample") else 0.0
    return {**made, "temperature": made.get("temperature", usual)}


def _check_language(model: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError for a language if the checkpoint has no language tokens."""
    language = given.get("language")
    each = language if isinstance(language, list | tuple) else [language]
    if language is not None and not all(isinstance(one, str) for one in each):
        raise ValueError(
            f"language={format_value(language)} must be a string, such as 'en', or one per row"
        )
    known = vars(model.generation_config).get("lang_to_id")
    if language is not None and known is None:
        raise ValueError(
            f"language={language!r}, but this checkpoint has no language tokens; drop language="
        )


def _check_fallback(model: Any, given: Mapping[str, Any]) -> None:
    """Raises ValueError for settings on which Whisper's `generate()` fails."""
    for name in THRESHOLDS:
        if given.get(name) is not None:
            check_number(name, given[name], example=THRESHOLDS[name])
    temperature = given.get("temperature", 0.0)
    several = temperature if isinstance(temperature, list | tuple) else [temperature]
    for one in several:
        check_number("temperature", one, 0)
    if not several:
        raise ValueError(f"temperature={several!r} is empty; give 0.0, or (0.0, 0.2, 0.4)")
    check_values({name: one for name, one in given.items() if name != "temperature"})
    if given.get("condition_on_prev_tokens") is not None:
        check_flag("condition_on_prev_tokens", given["condition_on_prev_tokens"])
    config = vars(given.get("generation_config") or model.generation_config)
    is_set = {name: given.get(name, config.get(name)) is not None for name in THRESHOLDS}
    if is_set["no_speech_threshold"] and not is_set["logprob_threshold"]:
        raise ValueError(
            "no_speech_threshold= is compared only below logprob_threshold=, which is not set; "
            f"give both, such as {THRESHOLDS['no_speech_threshold']} and "
            f"{THRESHOLDS['logprob_threshold']}"
        )


def _config_with_forced_ids(model: Any, forced: Any, given: Mapping[str, Any]) -> Any:
    """A generation configuration with forced tokens, pairs (position, id) from position 1.

    They take precedence over a language and task of the checkpoint. Raises ValueError if
    `language` or `task` is given too, which Whisper would use instead, and for invalid pairs.
    """
    conflicting = [name for name in ("language", "task") if given.get(name) is not None]
    if conflicting:
        raise ValueError(
            f"forced_decoder_ids and {' and '.join(conflicting)} both set the first tokens; give "
            "one of them"
        )
    vocabulary = int(model.config.vocab_size)
    try:
        pairs = [[int(position), int(token)] for position, token in forced]
    except (TypeError, ValueError):
        pairs = []
    is_consecutive = all(at == index + 1 for index, (at, _) in enumerate(pairs))
    if not pairs or not is_consecutive or not all(0 <= token < vocabulary for _, token in pairs):
        raise ValueError(
            f"forced_decoder_ids={format_value(forced)} are not pairs (position, id) with "
            f"positions from 1 and ids below {vocabulary}; give the output of "
            "processor.get_decoder_prompt_ids()"
        )
    config = copy.deepcopy(given.get("generation_config") or model.generation_config)
    config.forced_decoder_ids, config.language, config.task = pairs, None, None
    return config


class EncoderCache:
    """The encoder states of the rows of one request, by a hash of their features.

    Whisper's own `generate()` encodes a window to detect its language, again to transcribe it, and
    again at every fallback temperature; here each row passes through the encoder once. `features`
    are those of the last call: a draft model with an encoder of its own needs them, and
    transformers passes on encoded states only.
    """

    def __init__(self, encoder: Any) -> None:
        self.replaced_forward = vars(encoder).get("forward")  # set by hooks of others
        self.forward, self.users = encoder.forward, 0
        self.states: dict[bytes, Tensor] = {}
        self.features: Tensor | None = None

    def __call__(self, input_features: Tensor, *args: Any, **options: Any) -> Any:
        """The encoder's forward; only rows that are not cached are computed."""
        if args or any(
            _is_requested(value) for name, value in options.items() if name != "return_dict"
        ):
            return self.forward(input_features, *args, **options)
        self.features = input_features
        keys = [_hash_row(row) for row in input_features]
        missing = {key: row for row, key in enumerate(keys) if key not in self.states}
        if missing:
            states = self.forward(input_features[list(missing.values())])[0]
            cached = {key: state for key, state in self.states.items() if key in keys}
            self.states = {**cached, **dict(zip(missing, states, strict=True))}  # this window only
        return BaseModelOutput(last_hidden_state=torch.stack([self.states[key] for key in keys]))


@contextmanager
def cache_encoder(model: Any) -> Iterator[EncoderCache]:
    """Cache the encoder's states within this block."""
    encoder = model.get_encoder()
    current = vars(encoder).get("forward")  # a cache, if another stream is still active
    cached = current if isinstance(current, EncoderCache) else EncoderCache(encoder)
    cached.users += 1
    encoder.forward = cached
    try:
        yield cached
    finally:
        cached.users -= 1
        if not cached.users:
            del encoder.forward
            if cached.replaced_forward is not None:
                encoder.forward = cached.replaced_forward


def _hash_row(row: Tensor) -> bytes:
    return row.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _is_requested(value: Any) -> bool:
    """Whether an option requests an output beyond the states."""
    return value is not None and value is not False
