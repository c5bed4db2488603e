"""Train Granite Speech: the encoder by CTC, then projector and language model."""

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
from mmspec.modalities.speech.recognition.inputs import DEFAULT_PROMPT, format_prompt
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, split_parameters
from tools.zoo.speech.recognition.granite import AUDIO, BLOCK, QUERIES
from tools.zoo.speech.recognition.losses import (
    LetterPositions,
    corrupt_letters,
    ctc_loss,
    guided_attention_loss,
)
from tools.zoo.speech.recognition.spans import AlignedSpan, batch_spans
from tools.zoo.speech.recognition.windows import generate_windows

IGNORED = -100
_LONGEST_S = 4.0
_GUIDANCE = 0.3  # weight of the guided attention loss
_MAX_POSITIONS = 1500  # per batch: letters and audio embeddings
_AT_ONCE = 64
_PROMPTS = (DEFAULT_PROMPT, "", "", "")  # mostly empty, which is faster


@dataclass(frozen=True)
class GraniteExamples:
    """Per recording: features (T, 2 * mels) float16, and its sentence, "" if none."""

    features: list[Tensor]
    texts: list[str]


def make_examples(
    processor: GraniteSpeechProcessor, count: int, run: TrainingRun
) -> GraniteExamples:
    """Recordings as the processor's own features, without windows of two sentences."""
    features, texts = [], []
    reader: Any = processor
    extract = reader.audio_processor
    for one in generate_windows(run.limit_steps(count, _AT_ONCE), run.seed, _LONGEST_S):
        if len(one.segments) < 2:
            features.append(extract(one.waveform)["input_features"][0].half())
            texts.append(one.text or "")
    return GraniteExamples(features, texts)


def concatenate(first: GraniteExamples, second: GraniteExamples) -> GraniteExamples:
    """The examples of both."""
    return GraniteExamples(first.features + second.features, first.texts + second.texts)


def train_encoder(
    model: Any, examples: GraniteExamples, batch: int, schedule: CosineDecay, run: TrainingRun
) -> None:
    """Train the encoder and its CTC head over letters."""
    encoder = model.model.encoder

    def loss_of(picked: np.ndarray) -> Tensor:
        features = [examples.features[i].float() for i in picked]
        states = encoder(pad_sequence(features, batch_first=True)).last_hidden_state
        frames = torch.tensor([len(one) for one in features])
        return ctc_loss(encoder.out(states), [examples.texts[i] for i in picked], frames)

    items = _batch_by_length([len(one) for one in examples.features], batch, run.seed)
    matrices, others = split_parameters(encoder.layers, encoder.parameters())
    fit(others, items, loss_of, schedule, "hear", run, matrices=matrices)


@torch.no_grad()
def encode_spans(model: Any, examples: GraniteExamples) -> list[AlignedSpan]:
    """Encoder states of each recording, and the CTC alignment of each letter."""
    encoder, found = model.model.encoder.eval(), []
    for features, text in zip(examples.features, examples.texts, strict=True):
        states = encoder(features[None].float()).last_hidden_state[0]
        letters = align(encoder.out(states).log_softmax(-1), [ord(one) for one in text])
        found.append(AlignedSpan(states.half(), text, tuple((r.start, r.stop) for r in letters)))
    return found


def train_decoder(
    model: Any,
    processor: GraniteSpeechProcessor,
    pool: Sequence[AlignedSpan],
    growing: int,
    schedule: CosineDecay,
    run: TrainingRun,
) -> None:
    """Train the projector and the language model on states of the frozen encoder.

    In the first `growing` batches spans grow from words to sentences; if `growing` is above 0,
    attention is guided. All later batches are sentences.
    """
    generator = np.random.default_rng((run.seed, 6))
    noise = torch.Generator().manual_seed(run.seed)
    inner, is_guided = model.model, growing > 0
    inner.language_model.set_attn_implementation("eager" if is_guided else "sdpa")

    def loss_of(spans: list[AlignedSpan]) -> Tensor:
        prompt = _PROMPTS[generator.integers(len(_PROMPTS))]
        batch = _batch(processor, spans, prompt)
        ids = corrupt_letters(batch.ids, batch.labels != IGNORED, noise)
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
        return (
            loss + _GUIDANCE * guided_attention_loss(made.attentions, batch.places)
            if is_guided
            else loss
        )

    parameters = [
        *inner.projector.parameters(),
        *inner.language_model.parameters(),
        *model.lm_head.parameters(),
    ]
    items = batch_spans(pool, _MAX_POSITIONS, BLOCK // QUERIES, run.limit_steps(growing), run.seed)
    matrices, others = split_parameters(inner.language_model.layers, parameters)
    fit(others, items, loss_of, schedule, "write", run, matrices=matrices)
    inner.language_model.set_attn_implementation("sdpa")


@dataclass(frozen=True)
class TranscriptBatch:
    """ids, labels: (B, L), padded on the right. mask: (B, n), the valid audio embeddings."""

    ids: Tensor
    labels: Tensor
    mask: Tensor
    places: LetterPositions


def _batch(
    processor: GraniteSpeechProcessor, spans: Sequence[AlignedSpan], prompt: str
) -> TranscriptBatch:
    tokenizer: Any = processor.tokenizer
    counts = [-(-len(one.states) // BLOCK) * QUERIES for one in spans]
    opening, rows, labels, places = format_prompt(processor, prompt), [], [], []
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
    letters = LetterPositions(*torch.tensor(places, dtype=torch.long).reshape(-1, 3).unbind(1))
    return TranscriptBatch(
        ids, pad_sequence(labels, batch_first=True, padding_value=IGNORED), mask, letters
    )


def _batch_by_length(lengths: Sequence[int], batch: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of recordings in batches of similar length, in random order, endlessly."""
    generator = np.random.default_rng((seed, 5))
    while True:
        noisy = np.array(lengths) + generator.uniform(0, 8, len(lengths))
        cuts = np.array_split(np.argsort(noisy), -(-len(lengths) // batch))
        yield from (cuts[i] for i in generator.permutation(len(cuts)))
