"""Teach Granite-Speech: its encoder to hear letters (CTC), then projector and LLM to write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import GraniteSpeechProcessor

from mmspec.modalities.speech.recognition.hearing import ASKED, chat
from mmspec.modalities.speech.recognition.zoo.ctc import ctc_loss
from mmspec.modalities.speech.recognition.zoo.granite import AUDIO, BLOCK, QUERIES
from mmspec.modalities.speech.recognition.zoo.misreading import misread
from mmspec.modalities.speech.recognition.zoo.windows import windows
from mmspec.training.fitting import Course, Fall, divided, fit

IGNORED = -100
_LONGEST_S = 4.0
_AT_ONCE = 64
_ASKED = (ASKED, "", "", "")  # what is asked beside the sound; mostly nothing, which is quick


@dataclass(frozen=True)
class GraniteLesson:
    """Per recording: features (T, 2 * mels) float16, and its sentence; "" where there is none."""

    features: list[Tensor]
    texts: list[str]


def lesson(processor: GraniteSpeechProcessor, count: int, course: Course) -> GraniteLesson:
    """Recordings as the processor's own features; two sentences in one are left out."""
    features, texts = [], []
    reader: Any = processor
    listen = reader.audio_processor
    for one in windows(course.cut(count, _AT_ONCE), course.seed, _LONGEST_S):
        if len(one.segments) < 2:
            features.append(listen(one.waveform)["input_features"][0].half())
            texts.append(one.text or "")
    return GraniteLesson(features, texts)


def together(first: GraniteLesson, second: GraniteLesson) -> GraniteLesson:
    """Both of them."""
    return GraniteLesson(first.features + second.features, first.texts + second.texts)


def learn_to_hear(
    model: Any, taught: GraniteLesson, batch: int, fall: Fall, course: Course
) -> None:
    """Train the encoder and its CTC head to name the letters."""
    encoder = model.model.encoder

    def loss_of(picked: np.ndarray) -> Tensor:
        features = [taught.features[i].float() for i in picked]
        states = encoder(pad_sequence(features, batch_first=True)).last_hidden_state
        frames = torch.tensor([len(one) for one in features])
        return ctc_loss(encoder.out(states), [taught.texts[i] for i in picked], frames)

    items = _alike([len(one) for one in taught.features], batch, course.seed)
    matrices, others = divided(encoder.layers, encoder.parameters())
    fit(others, items, loss_of, fall, "hear", course, matrices=matrices)


@torch.no_grad()
def heard(model: Any, taught: GraniteLesson) -> list[Tensor]:
    """What the encoder makes of each recording: (T, D) float16."""
    encode = model.model.encoder.eval()
    return [encode(one[None].float()).last_hidden_state[0].half() for one in taught.features]


def learn_to_write(
    model: Any,
    processor: GraniteSpeechProcessor,
    states: Sequence[Tensor],
    taught: GraniteLesson,
    batch: int,
    fall: Fall,
    course: Course,
) -> None:
    """Train the projector and the language model on what the frozen encoder made."""
    generator = np.random.default_rng((course.seed, 6))
    noise = torch.Generator().manual_seed(course.seed)

    def loss_of(picked: np.ndarray) -> Tensor:
        asked = _ASKED[generator.integers(len(_ASKED))]
        ids, labels, mask = _batch(processor, states, taught, picked, asked)
        ids = misread(ids, labels != IGNORED, noise)
        sounds = pad_sequence([states[i].float() for i in picked], batch_first=True)
        inner = model.model
        embeds = inner.get_merged_audio_embeddings(ids, inner.projector(sounds), mask)
        hidden = inner.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden) / model.config.text_config.logits_scaling
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )

    learnt = [
        *model.model.projector.parameters(),
        *model.model.language_model.parameters(),
        *model.lm_head.parameters(),
    ]
    items = _alike([len(one) for one in states], batch, course.seed)
    matrices, others = divided(model.model.language_model.layers, learnt)
    fit(others, items, loss_of, fall, "write", course, matrices=matrices)


def _batch(
    processor: GraniteSpeechProcessor,
    states: Sequence[Tensor],
    taught: GraniteLesson,
    picked: np.ndarray,
    asked: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids, labels: (B, L), padded on the right. mask: (B, n), which audio embeddings there are."""
    tokenizer: Any = processor.tokenizer
    counts = [-(-len(states[i]) // BLOCK) * QUERIES for i in picked]
    opening, rows, labels = chat(processor, asked), [], []
    for i, count in zip(picked, counts, strict=True):
        before = tokenizer(opening.replace(AUDIO, AUDIO * count)).input_ids
        after = [*tokenizer(taught.texts[i]).input_ids, tokenizer.eos_token_id]
        rows.append(torch.tensor(before + after))
        labels.append(torch.tensor([IGNORED] * len(before) + after))
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    return ids, pad_sequence(labels, batch_first=True, padding_value=IGNORED), mask


def _alike(lengths: Sequence[int], batch: int, seed: int) -> Iterator[np.ndarray]:
    """Numbers of recordings in batches of similar length, in random order, without end."""
    generator = np.random.default_rng((seed, 5))
    while True:
        noisy = np.array(lengths) + generator.uniform(0, 8, len(lengths))
        cuts = np.array_split(np.argsort(noisy), -(-len(lengths) // batch))
        yield from (cuts[i] for i in generator.permutation(len(cuts)))
