"""Train a codec language model: next-token loss on the codes of sentences and their end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Xcodec2Model

from mmspec.modalities.speech.sentences import sentence_seeds
from mmspec.modalities.speech.utterances import ZOO_VOICES, RecordingConditions, utterance
from mmspec.training.fitting import (
    CosineDecay,
    TrainingProgress,
    TrainingRun,
    fit,
    shuffle_batches,
    silent,
    split_parameters,
)
from mmspec.zoo.scene import Split
from tools.zoo.speech.synthesis import models
from tools.zoo.speech.synthesis.codec import HOP, RATE_HZ
from tools.zoo.speech.synthesis.codec_training import CodecInput, encode

IGNORED = -100
SENTENCES = 2400


@dataclass(frozen=True)
class SpeechRow:
    """A prompt, its speech ids (codes and end), and the prompt position of each code's word."""

    prompt: list[int]
    speech: list[int]
    word_positions: list[int]  # per code


@dataclass(frozen=True)
class SpeechBatch:
    """A batch of rows, padded on the right; `IGNORED` for prompts and padding."""

    ids: Tensor  # (B, L)
    labels: Tensor  # (B, L)
    words: Tensor  # (B, L, 2) the word of a code, and the next one


@dataclass(frozen=True)
class CorpusUtterance:
    """A sentence, its speaker, and a waveform (T,) at 16 kHz."""

    text: str
    speaker: str
    waveform: Tensor


def make_corpus(
    sentences: int, split: Split = "train", progress: TrainingProgress = silent
) -> list[CorpusUtterance]:
    """Distinct sentences in all voices. Raises RuntimeError if espeak-ng is missing."""
    found: list[CorpusUtterance] = []
    for number, seed in enumerate(sentence_seeds(sentences, split)):
        for speaker, voice in ZOO_VOICES.items():
            one = utterance(seed, split, voice, RecordingConditions())
            found.append(CorpusUtterance(one.text, speaker, one.waveform))
        progress("speak", number + 1, sentences, 0.0)
    return found


def assign_words(words: Sequence[str], frames: int) -> list[int]:
    """The index of the word spoken in each of `frames`, estimated from word lengths.

    The duration of a word is proportional to its letters plus one; silence at the edges counts as
    the first or last word.
    """
    recording = RecordingConditions()
    lead, tail = (round(one * RATE_HZ / HOP) for one in (recording.lead_s, recording.tail_s))
    ends = torch.tensor([*accumulate(len(word) + 1 for word in words)])
    ends = lead + ends * (max(frames - lead - tail, 1) / int(ends[-1]))
    indices = torch.searchsorted(ends, torch.arange(frames) + 0.5)
    found: list[int] = indices.clamp_max(len(words) - 1).tolist()
    return found


@torch.no_grad()
def encode_codes(codec: Xcodec2Model, inputs: CodecInput) -> list[int]:
    """The codes of an utterance."""
    parts = codec.quantizer
    _, codes = parts(encode(codec, inputs.features[None]))
    found: list[int] = codes[0, :, 0].tolist()
    return found


def make_rows(
    utterances: Sequence[CorpusUtterance], codes: Sequence[Sequence[int]]
) -> list[SpeechRow]:
    """Training rows from utterances and their codes."""
    layout = models.speech_layout()
    found = []
    for one, row in zip(utterances, codes, strict=True):
        words = assign_words(one.text.split(), len(row))
        speech = [*(layout.first + code for code in row), layout.end]
        prompt = models.build_prompt(one.text, one.speaker)
        found.append(SpeechRow(prompt, speech, [1 + word for word in words]))
    return found


def batches(pool: Sequence[SpeechRow], size: int, seed: int) -> Iterator[SpeechBatch]:
    """Endless batches of rows of similar length."""
    ordered = sorted(pool, key=lambda row: len(row.prompt) + len(row.speech))
    groups = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    for number in shuffle_batches(len(groups), 1, np.random.default_rng(seed)):
        yield _pad_rows(groups[int(number[0])])


def _pad_rows(group: Sequence[SpeechRow]) -> SpeechBatch:
    length = max(len(row.prompt) + len(row.speech) for row in group)
    ids = torch.zeros(len(group), length, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    words = torch.full((*ids.shape, 2), IGNORED)
    for index, row in enumerate(group):
        whole = torch.tensor([*row.prompt, *row.speech])
        ids[index, : len(whole)] = whole
        labels[index, len(row.prompt) : len(whole)] = whole[len(row.prompt) :]
        at = torch.tensor(row.word_positions)
        pair = whole[torch.stack((at, at + 1), -1)]
        words[index, len(row.prompt) : len(whole) - 1] = pair
    return SpeechBatch(ids, labels, words)


def train_speech_model(
    model: LlamaForCausalLM,
    examples: Iterator[SpeechBatch],
    schedule: CosineDecay,
    run: TrainingRun,
    word_loss_weight: float = 0.0,
) -> None:
    """Train a model on speech.

    With `word_loss_weight` an auxiliary head, dropped afterwards, predicts the current and the next
    word from the states at two thirds of the depth. The model then learns its position in the text
    earlier than from the codes alone.
    """
    model.train()
    word_head = nn.Linear(model.config.hidden_size, 2 * models.speech_layout().first)
    matrices, others = split_parameters(model.model.layers, model.parameters())
    if word_loss_weight:
        others = [*others, *word_head.parameters()]

    def loss_of(batch: SpeechBatch) -> Tensor:
        return speech_loss(model, batch, word_head if word_loss_weight else None, word_loss_weight)

    fit(others, examples, loss_of, schedule, "speak", run, matrices)
    model.train(False)


def speech_loss(
    model: LlamaForCausalLM,
    batch: SpeechBatch,
    word_head: nn.Module | None = None,
    word_loss_weight: float = 0.0,
) -> Tensor:
    """Cross entropy of codes and ends, plus `word_loss_weight` times that of their words."""
    out = model(input_ids=batch.ids, use_cache=False, output_hidden_states=word_head is not None)
    total = _entropy(out.logits[:, :-1], batch.labels[:, 1:])
    if word_head is not None:
        assert out.hidden_states is not None
        states = out.hidden_states[2 * model.config.num_hidden_layers // 3][:, :-1]
        logits = word_head(functional.layer_norm(states, states.shape[-1:])).unflatten(-1, (2, -1))
        total = total + word_loss_weight * _entropy(logits, batch.words[:, 1:])
    return total


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:  # (..., V), (...) -> ()
    return functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED
    )
