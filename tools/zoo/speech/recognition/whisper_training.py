"""Train Whisper: the encoder by CTC, then the decoder, with and without timestamps."""

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
from mmspec.training.fitting import (
    CosineDecay,
    TrainingRun,
    fit,
    iterate_chunks,
    shuffle_batches,
    split_parameters,
)
from tools.zoo.speech.recognition.losses import LABELS, corrupt_letters, ctc_loss
from tools.zoo.speech.recognition.whisper import CHUNK_S, WIDTH, extract_features
from tools.zoo.speech.recognition.windows import AudioWindow, generate_windows

IGNORED = -100
_STAMP_S = 0.1  # resolution of timestamps in training
_AT_ONCE = 64
_PREFIX_LENGTH = 4  # start, language, task, no-timestamps or first timestamp


@dataclass(frozen=True)
class WhisperExamples:
    """features: (N, mels, frames) float16. Per window the target ids with and without timestamps.

    A window with a second, cut-off sentence has no ids without timestamps.
    """

    features: Tensor
    texts: list[str | None]
    timed: list[list[int]]
    untimed: list[list[int] | None]


def make_examples(processor: WhisperProcessor, count: int, run: TrainingRun) -> WhisperExamples:
    """Windows of audio as Whisper's own features, and their target ids."""
    found = list(generate_windows(run.limit_steps(count, _AT_ONCE), run.seed, CHUNK_S))
    features = []
    for part in iterate_chunks(found, _AT_ONCE, "listen", run.progress):
        features.append(extract_features(processor, [one.waveform for one in part]).half())
    return WhisperExamples(
        torch.cat(features),
        [one.text for one in found],
        [with_times(processor, one) for one in found],
        [without_times(processor, one) for one in found],
    )


def train_encoder(
    model: Any, examples: WhisperExamples, batch: int, schedule: CosineDecay, run: TrainingRun
) -> None:
    """Train the encoder alone, with a linear CTC head over letters."""
    encoder, head = model.model.encoder, nn.Linear(WIDTH, LABELS)
    one = np.array([i for i, text in enumerate(examples.texts) if text is not None])
    items = (one[p] for p in _shuffle_batches(len(one), batch, run.seed))

    def loss_of(picked: np.ndarray) -> Tensor:
        states = encoder(examples.features[picked].float()).last_hidden_state
        frames = torch.full((len(picked),), states.shape[1])
        return ctc_loss(head(states), [str(examples.texts[i]) for i in picked], frames)

    matrices, others = split_parameters(encoder.layers, [*encoder.parameters(), *head.parameters()])
    parameters = [one for one in others if one.requires_grad]  # the positions are fixed
    fit(parameters, items, loss_of, schedule, "hear", run, matrices=matrices)


@torch.no_grad()
def encode_windows(model: Any, examples: WhisperExamples) -> Tensor:
    """Encoder states (N, T, D) float16 of all windows."""
    encode = model.model.encoder
    parts = examples.features.split(_AT_ONCE)
    return torch.cat([encode(part.float()).last_hidden_state.half() for part in parts])


def train_decoder(
    model: Any,
    states: Tensor,
    examples: WhisperExamples,
    batch: int,
    schedule: CosineDecay,
    run: TrainingRun,
) -> None:
    """Train the decoder on states of the frozen encoder."""

    def loss_of(picked: np.ndarray) -> Tensor:
        ids, labels = _batch(examples, picked)
        encoded = (states[picked].float(),)
        out = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False)
        return _cross_entropy(out.logits, labels)

    items = _shuffle_batches(len(states), batch, run.seed)
    decoder = model.model.decoder
    matrices, others = split_parameters(decoder.layers, decoder.parameters())
    fit(others, items, loss_of, schedule, "write", run, matrices=matrices)


def train_drafter(
    drafter: Any,
    target: Any,
    states: Tensor,
    examples: WhisperExamples,
    batch: int,
    schedule: CosineDecay,
    run: TrainingRun,
) -> None:
    """Distil a target's decoder on the states of the shared encoder.

    Cross entropy against the target's distribution of every next token.
    """

    def loss_of(picked: np.ndarray) -> Tensor:
        ids, labels = _batch(examples, picked)
        encoded = (states[picked].float(),)
        with torch.no_grad():
            logits = target(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits
        out = drafter(input_ids=ids, encoder_outputs=encoded, use_cache=False)
        is_label = labels != IGNORED
        teacher = logits[is_label].float().softmax(-1)
        return functional.cross_entropy(out.logits[is_label].float(), teacher)

    items = _shuffle_batches(len(states), batch, run.seed)
    decoder = drafter.model.decoder
    matrices, others = split_parameters(decoder.layers, decoder.parameters())
    fit(others, items, loss_of, schedule, "write", run, matrices=matrices)


def train_jointly(
    model: Any, examples: WhisperExamples, batch: int, schedule: CosineDecay, run: TrainingRun
) -> None:
    """Train encoder and decoder jointly, with corrupted decoder inputs."""
    generator = torch.Generator().manual_seed(run.seed)

    def loss_of(picked: np.ndarray) -> Tensor:
        ids, labels = _batch(examples, picked)
        is_text = torch.arange(ids.shape[1]).expand_as(ids) >= _PREFIX_LENGTH
        ids, features = corrupt_letters(ids, is_text, generator), examples.features[picked].float()
        out = model(features, decoder_input_ids=ids, use_cache=False)
        return _cross_entropy(out.logits, labels)

    items = _shuffle_batches(len(examples.features), batch, run.seed)
    layers = nn.ModuleList([model.model.encoder.layers, model.model.decoder.layers])
    matrices, others = split_parameters(layers, [p for p in model.parameters() if p.requires_grad])
    fit(others, items, loss_of, schedule, "together", run, matrices=matrices)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED
    )


def _batch(examples: WhisperExamples, picked: np.ndarray) -> tuple[Tensor, Tensor]:
    """ids, labels: (B, L). Timestamps are used for every other window, and where required."""
    rows = []
    for turn, i in enumerate(picked):
        untimed = examples.untimed[i]
        rows.append(examples.timed[i] if untimed is None or turn % 2 else untimed)
    width = max(map(len, rows)) - 1
    ids, labels = torch.zeros(len(rows), width).long(), torch.full((len(rows), width), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row) - 1] = torch.tensor(row[:-1])
        labels[i, : len(row) - 1] = torch.tensor(row[1:])
    return ids, labels


def _shuffle_batches(count: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    whole = count - count % batch
    return (part for part in shuffle_batches(whole, batch, np.random.default_rng((seed, 4))))


def without_times(processor: WhisperProcessor, window: AudioWindow) -> list[int] | None:
    if len(window.segments) > 1:
        return None
    tokenizer: Any = processor.tokenizer
    text = "".join(" " + one.text for one in window.segments)
    ids: list[int] = tokenizer(text).input_ids
    return ids


def with_times(processor: WhisperProcessor, window: AudioWindow) -> list[int]:
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
