"""A recogniser's own `generate()` around our loop.

Whisper's sets language, task and timestamps, walks through long sounds window by window, and tries
higher temperatures where words repeat. All that stays the library's: it calls the loop of
transformers once per window and temperature, and that loop is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from mmspec import _hf
from mmspec.draft import Round
from mmspec.errors import described
from mmspec.modalities.common.text import Text
from mmspec.modalities.speech.recognition.encoded_once import EncodedOnce, encoded_once
from mmspec.modality import Call, Loop
from mmspec.stats import Stats
from mmspec.targets.tokens.generation_settings import sampled

# what its loop keeps no states for, or hands out piece by piece
REFUSED = {
    "return_token_timestamps": "words are timed by attention of every step, and a forward here "
    "reads several; give return_timestamps=True, which times pieces",
    "streamer": "stream() hands out tokens as they come",
    "past_key_values": "a window is read whole",
    "num_beams": "a row follows one path, not beams",
    "assistant_model": "give the small model to accelerate(model, drafter=...)",
}


@dataclass(frozen=True)
class Written:
    """What Whisper's `generate()` returns, and the run's own report."""

    sequences: Tensor  # (B, T) without prompt
    stats: Stats
    segments: list[list[dict[str, Any]]] | None = None  # per row; start and end in seconds
    scores: tuple[Tensor, ...] | None = None  # (B, V) per new token, where they were asked for
    logits: tuple[Tensor, ...] | None = None
    past_key_values: None = None  # a window is read whole
    rounds: tuple[int, ...] = ()  # tokens of each round, of all rows and windows


def is_own(model: Any) -> bool:
    """Whether a model's `generate()` does more than the loop of transformers."""
    return isinstance(_hf.uncompiled(model), WhisperGenerationMixin)


def generate(text: Text, arguments: Mapping[str, Any], loop: Loop) -> Written:
    """`model.generate(**arguments)` with our loop inside. Raises ValueError for what that cannot.

    Windows and temperatures draw from noise of their own: the n-th of them from `seed + n`.
    """
    model = text.bound.model
    given = {name: one for name, one in arguments.items() if one is not None}
    for name, why in REFUSED.items():
        if given.get(name) and given[name] != 1:
            raise ValueError(f"{name}={described(given[name])}: {why}; drop it")
    if given.get("input_features") is None and given.get("encoder_outputs") is None:
        raise ValueError(
            "there is nothing to encode; give input_features, as the processor makes them"
        )
    _check_language(model, given)
    forced = given.pop("forced_decoder_ids", None)
    if forced is not None:
        given["generation_config"] = _forced(model, forced, given)
    text.check({name: one for name, one in given.items() if name in text.inputs})
    own = {name: given.pop(name, None) for name in ("seed", "row_ids")}
    own["drafter_inputs"] = given.pop("drafter_inputs", None)
    noted = _Noted(loop)
    with encoded_once(model) as once:
        found = model.generate(**_tried(given), custom_generate=_WindowHook(text, noted, once, own))
    told: dict[str, Any] = {"stats": loop.stats(), "rounds": tuple(noted.rounds)}
    if isinstance(found, Tensor):
        return Written(found, **told)
    rest = {name: found.get(name) for name in ("segments", "scores", "logits")}
    return Written(found["sequences"], **told, **rest)


class _Noted:
    """The loop, and how many tokens each of its rounds brought."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.rounds = loop, list[int]()

    @property
    def is_watched(self) -> bool:
        return self.loop.is_watched

    def __call__(self, call: Call) -> Iterator[Round]:
        for kept in self.loop(call):
            self.rounds.append(sum(map(len, kept.tokens)))
            yield kept

    def stats(self) -> Stats:
        return self.loop.stats()

    def report(self, stats: Stats) -> None:
        self.loop.report(stats)


class _WindowHook:
    """The hook of one request: called for every window at every temperature."""

    def __init__(self, text: Text, loop: Loop, once: EncodedOnce, own: Mapping[str, Any]) -> None:
        self.text, self.loop, self.once, self.own, self.count = text, loop, once, own, 0
        self.__signature__ = text.signature  # what transformers looks at

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        seed, rows = self.own["seed"], self.own["row_ids"]
        if rows is not None and len(rows) != len(args[1]):
            raise ValueError(
                f"row_ids={list(rows)}, but Whisper goes on with {len(args[1])} of these rows; ask "
                "row by row, as transcribe() does"
            )
        given = {
            "seed": None if seed is None else seed + self.count,
            "row_ids": rows,
            "drafter_inputs": self.own["drafter_inputs"] or {"input_features": self.once.features},
        }
        self.count += 1
        return self.text.hook(args, {**arguments, **given}, self.loop)


def _tried(given: dict[str, Any]) -> dict[str, Any]:
    """Sampling as `generate` here takes it; several temperatures are Whisper's own affair."""
    if isinstance(given.get("temperature"), list | tuple):
        return given
    made = sampled(given)  # Whisper samples where it is told a temperature, and there alone
    usual = 1.0 if made.get("do_sample") else 0.0
    return {**made, "temperature": made.get("temperature", usual)}


def _check_language(model: Any, given: Mapping[str, Any]) -> None:
    """One error for a language that the model has no token of. Raises ValueError."""
    known = vars(model.generation_config).get("lang_to_id")
    if given.get("language") is not None and known is None:
        raise ValueError(
            f"language={given['language']!r}, but this checkpoint has no tokens of languages; drop "
            "language="
        )


def _forced(model: Any, forced: Any, given: Mapping[str, Any]) -> Any:
    """A configuration that begins with these tokens, (place, id) from place 1 on.

    They come before a language and a task of the checkpoint's own. Raises ValueError where these
    are told as well, which Whisper obeys instead, and for what are no such tokens.
    """
    told = [name for name in ("language", "task") if given.get(name) is not None]
    if told:
        raise ValueError(
            f"forced_decoder_ids and {' and '.join(told)} both say how the transcript begins; give "
            "one of them"
        )
    vocabulary = int(model.config.vocab_size)
    try:
        pairs = [[int(place), int(token)] for place, token in forced]
    except (TypeError, ValueError):
        pairs = []
    is_row = all(place == at + 1 for at, (place, _) in enumerate(pairs))
    if not pairs or not is_row or not all(0 <= token < vocabulary for _, token in pairs):
        raise ValueError(
            f"forced_decoder_ids={described(forced)} are no pairs (place, id) with places from 1 "
            f"on and ids below {vocabulary}; give what processor.get_decoder_prompt_ids() makes"
        )
    config = copy.deepcopy(given.get("generation_config") or model.generation_config)
    config.forced_decoder_ids, config.language, config.task = pairs, None, None
    return config
