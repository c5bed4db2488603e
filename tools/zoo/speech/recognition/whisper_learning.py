"""Teach Whisper: its encoder to hear letters, then its decoder to write, with and without times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import WhisperProcessor

from mmspec.modalities.speech.utterances import RATE_HZ
from mmspec.training.fitting import Course, Fall, chunks, divided, fit, shuffled
from tools.zoo.speech.recognition.ctc import LABELS, ctc_loss
from tools.zoo.speech.recognition.misreading import misread
from tools.zoo.speech.recognition.whisper import CHUNK_S, WIDTH, features_of
from tools.zoo.speech.recognition.windows import HearingWindow, windows

IGNORED = -100
_STAMP_S = 0.1  # timestamps are taught this coarsely
_AT_ONCE = 64
_OPENING = 4  # start, language, task, no times or the first


@dataclass(frozen=True)
class WhisperLesson:
    """features: (N, mels, frames) float16. Per window what to write: with times, and without.

    A second sentence that begins in a window is left to the next one, so it has no plain words.
    """

    features: Tensor
    texts: list[str | None]
    stamped: list[list[int]]
    plain: list[list[int] | None]


def lesson(processor: WhisperProcessor, count: int, course: Course) -> WhisperLesson:
    """Windows of sound as Whisper's own features, and the ids of what is said."""
    found, features = list(windows(course.cut(count, _AT_ONCE), course.seed, CHUNK_S)), []
    for part in chunks(found, _AT_ONCE, "listen", course.progress):
        features.append(features_of(processor, [one.waveform for one in part]).half())
    return WhisperLesson(
        torch.cat(features),
        [one.text for one in found],
        [stamped(processor, one) for one in found],
        [plain(processor, one) for one in found],
    )


def learn_to_hear(
    model: Any, taught: WhisperLesson, batch: int, fall: Fall, course: Course
) -> None:
    """Train the encoder alone: a linear head names the letters of the sentence (CTC)."""
    encoder, head = model.model.encoder, nn.Linear(WIDTH, LABELS)
    one = np.array([i for i, text in enumerate(taught.texts) if text is not None])
    items = (one[p] for p in _orders(len(one), batch, course.seed))

    def loss_of(picked: np.ndarray) -> Tensor:
        states = encoder(taught.features[picked].float()).last_hidden_state
        frames = torch.full((len(picked),), states.shape[1])
        return ctc_loss(head(states), [str(taught.texts[i]) for i in picked], frames)

    matrices, others = divided(encoder.layers, [*encoder.parameters(), *head.parameters()])
    learnt = [one for one in others if one.requires_grad]  # the positions are fixed
    fit(learnt, items, loss_of, fall, "hear", course, matrices=matrices)


@torch.no_grad()
def heard(model: Any, taught: WhisperLesson) -> Tensor:
    """(N, T, D) float16, what the encoder makes of all windows."""
    encode = model.model.encoder
    parts = taught.features.split(_AT_ONCE)
    return torch.cat([encode(part.float()).last_hidden_state.half() for part in parts])


def learn_to_write(
    model: Any, states: Tensor, taught: WhisperLesson, batch: int, fall: Fall, course: Course
) -> None:
    """Train the decoder on what the frozen encoder made of the windows."""

    def loss_of(picked: np.ndarray) -> Tensor:
        ids, labels = _batch(taught, picked)
        heard = (states[picked].float(),)
        out = model(encoder_outputs=heard, decoder_input_ids=ids, use_cache=False)
        return _surprise(out.logits, labels)

    items = _orders(len(states), batch, course.seed)
    matrices, others = divided(model.model.decoder.layers, model.model.decoder.parameters())
    fit(others, items, loss_of, fall, "write", course, matrices=matrices)


def learn_to_follow(
    drafter: Any,
    target: Any,
    states: Tensor,
    taught: WhisperLesson,
    batch: int,
    fall: Fall,
    course: Course,
) -> None:
    """Train a decoder to write what its target would, on states of the encoder that both read.

    Cross entropy against the target's distribution of every next token.
    """

    def loss_of(picked: np.ndarray) -> Tensor:
        ids, labels = _batch(taught, picked)
        heard = (states[picked].float(),)
        with torch.no_grad():
            said = target(encoder_outputs=heard, decoder_input_ids=ids, use_cache=False).logits
        out = drafter(input_ids=ids, encoder_outputs=heard, use_cache=False)
        real = labels != IGNORED
        return functional.cross_entropy(out.logits[real].float(), said[real].float().softmax(-1))

    items = _orders(len(states), batch, course.seed)
    matrices, others = divided(drafter.model.decoder.layers, drafter.model.decoder.parameters())
    fit(others, items, loss_of, fall, "write", course, matrices=matrices)


def learn_together(
    model: Any, taught: WhisperLesson, batch: int, fall: Fall, course: Course
) -> None:
    """Train encoder and decoder at once; letters it cannot trust make the decoder listen."""
    generator = torch.Generator().manual_seed(course.seed)

    def loss_of(picked: np.ndarray) -> Tensor:
        ids, labels = _batch(taught, picked)
        said = torch.arange(ids.shape[1]).expand_as(ids) >= _OPENING
        ids, features = misread(ids, said, generator), taught.features[picked].float()
        return _surprise(model(features, decoder_input_ids=ids, use_cache=False).logits, labels)

    items = _orders(len(taught.features), batch, course.seed)
    layers = nn.ModuleList([model.model.encoder.layers, model.model.decoder.layers])
    matrices, others = divided(layers, [p for p in model.parameters() if p.requires_grad])
    fit(others, items, loss_of, fall, "together", course, matrices=matrices)


def _surprise(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED
    )


def _batch(taught: WhisperLesson, picked: np.ndarray) -> tuple[Tensor, Tensor]:
    """ids, labels: (B, L). Every other window is written with times where it can be without."""
    rows = []
    for turn, i in enumerate(picked):
        plain = taught.plain[i]
        rows.append(taught.stamped[i] if plain is None or turn % 2 else plain)
    width = max(map(len, rows)) - 1
    ids, labels = torch.zeros(len(rows), width).long(), torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row) - 1] = torch.tensor(row[:-1])
        labels[i, : len(row) - 1] = torch.tensor(row[1:])
    return ids, labels


def _orders(count: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    whole = count - count % batch
    return (part for part in shuffled(whole, batch, np.random.default_rng((seed, 4))))


def plain(processor: WhisperProcessor, window: HearingWindow) -> list[int] | None:
    if len(window.segments) > 1:
        return None
    tokenizer: Any = processor.tokenizer
    text = "".join(" " + one.text for one in window.segments)
    ids: list[int] = tokenizer(text).input_ids
    return ids


def stamped(processor: WhisperProcessor, window: HearingWindow) -> list[int]:
    tokenizer: Any = processor.tokenizer
    ids = [*tokenizer.prefix_tokens[:-1]]
    for one in window.segments:
        ids.append(_stamp(tokenizer, one.start_s))
        if one.end_s <= len(window.waveform) / RATE_HZ:
            ids += tokenizer(" " + one.text, add_special_tokens=False).input_ids
            ids.append(_stamp(tokenizer, one.end_s))
    if not window.segments:
        ids.append(_stamp(tokenizer, 0.0))
    return [*ids, tokenizer.eos_token_id]


def _stamp(tokenizer: Any, time_s: float) -> int:
    found: int = tokenizer.convert_tokens_to_ids(f"<|{round(time_s / _STAMP_S) * _STAMP_S:.2f}|>")
    return found
