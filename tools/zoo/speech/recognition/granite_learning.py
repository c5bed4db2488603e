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

from mmspec.codes.ctc import align
from mmspec.modalities.speech.recognition.hearing import ASKED, chat
from mmspec.training.fitting import Course, Fall, divided, fit
from tools.zoo.speech.recognition.ctc import ctc_loss
from tools.zoo.speech.recognition.granite import AUDIO, BLOCK, QUERIES
from tools.zoo.speech.recognition.guided_attention import LetterPlaces, unheard
from tools.zoo.speech.recognition.misreading import misread
from tools.zoo.speech.recognition.spans import HeardSpan, lessons
from tools.zoo.speech.recognition.windows import windows

IGNORED = -100
_LONGEST_S = 4.0
_GUIDANCE = 0.3  # weight of attention beside the letters
_PLACES = 1500  # of a batch: letters and embeddings of sound
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
def heard(model: Any, taught: GraniteLesson) -> list[HeardSpan]:
    """What the encoder makes of each recording, and where its CTC head hears each letter."""
    encoder, found = model.model.encoder.eval(), []
    for features, text in zip(taught.features, taught.texts, strict=True):
        states = encoder(features[None].float()).last_hidden_state[0]
        letters = align(encoder.out(states).log_softmax(-1), [ord(one) for one in text])
        found.append(HeardSpan(states.half(), text, tuple((r.start, r.stop) for r in letters)))
    return found


def learn_to_write(
    model: Any,
    processor: GraniteSpeechProcessor,
    pool: Sequence[HeardSpan],
    growing: int,
    fall: Fall,
    course: Course,
) -> None:
    """Train the projector and the language model on what the frozen encoder made.

    For so many `growing` batches spans grow from words to sentences, and attention is guided if
    there are any; else all are sentences.
    """
    generator = np.random.default_rng((course.seed, 6))
    noise = torch.Generator().manual_seed(course.seed)
    inner, is_guided = model.model, growing > 0
    inner.language_model.set_attn_implementation("eager" if is_guided else "sdpa")

    def loss_of(spans: list[HeardSpan]) -> Tensor:
        asked = _ASKED[generator.integers(len(_ASKED))]
        batch = _batch(processor, spans, asked)
        ids = misread(batch.ids, batch.labels != IGNORED, noise)
        sounds = pad_sequence([one.states.float() for one in spans], batch_first=True)
        embeds = inner.get_merged_audio_embeddings(ids, inner.projector(sounds), batch.mask)
        made = inner.language_model(
            inputs_embeds=embeds, use_cache=False, output_attentions=is_guided
        )
        logits = model.lm_head(made.last_hidden_state) / model.config.text_config.logits_scaling
        loss = functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1),
            batch.labels[:, 1:].flatten(),
            ignore_index=IGNORED,
        )
        return loss + _GUIDANCE * unheard(made.attentions, batch.places) if is_guided else loss

    learnt = [
        *inner.projector.parameters(),
        *inner.language_model.parameters(),
        *model.lm_head.parameters(),
    ]
    items = lessons(pool, _PLACES, BLOCK // QUERIES, course.cut(growing), course.seed)
    matrices, others = divided(inner.language_model.layers, learnt)
    fit(others, items, loss_of, fall, "write", course, matrices=matrices)
    inner.language_model.set_attn_implementation("sdpa")


@dataclass(frozen=True)
class WrittenBatch:
    """ids, labels: (B, L), padded on the right. mask: (B, n), which audio embeddings there are."""

    ids: Tensor
    labels: Tensor
    mask: Tensor
    places: LetterPlaces


def _batch(
    processor: GraniteSpeechProcessor, spans: Sequence[HeardSpan], asked: str
) -> WrittenBatch:
    tokenizer: Any = processor.tokenizer
    counts = [-(-len(one.states) // BLOCK) * QUERIES for one in spans]
    opening, rows, labels, places = chat(processor, asked), [], [], []
    first = len(tokenizer(opening.split(AUDIO)[0]).input_ids)
    for row, (one, count) in enumerate(zip(spans, counts, strict=True)):
        before = tokenizer(opening.replace(AUDIO, AUDIO * count)).input_ids
        after = [*tokenizer(one.text).input_ids, tokenizer.eos_token_id]
        rows.append(torch.tensor(before + after))
        labels.append(torch.tensor([IGNORED] * len(before) + after))
        for number, (start, stop) in enumerate(one.frames):
            block = (start + stop - 1) // 2 // (BLOCK // QUERIES)
            places.append((row, len(before) - 1 + number, first + block))
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    told = LetterPlaces(*torch.tensor(places, dtype=torch.long).reshape(-1, 3).unbind(1))
    return WrittenBatch(
        ids, pad_sequence(labels, batch_first=True, padding_value=IGNORED), mask, told
    )


def _alike(lengths: Sequence[int], batch: int, seed: int) -> Iterator[np.ndarray]:
    """Numbers of recordings in batches of similar length, in random order, without end."""
    generator = np.random.default_rng((seed, 5))
    while True:
        noisy = np.array(lengths) + generator.uniform(0, 8, len(lengths))
        cuts = np.array_split(np.argsort(noisy), -(-len(lengths) // batch))
        yield from (cuts[i] for i in generator.permutation(len(cuts)))
