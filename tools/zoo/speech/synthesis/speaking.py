"""Teach a model to speak: next-token loss on the codes of sentences, and on where they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Xcodec2Model

from mmspec.training.fitting import Course, Fall, divided, fit, shuffled
from tools.zoo.speech.synthesis import models
from tools.zoo.speech.synthesis.codec_training import CodecInput, hidden
from tools.zoo.speech.synthesis.corpus import CorpusUtterance
from tools.zoo.speech.synthesis.timing import spans

IGNORED = -100


@dataclass(frozen=True)
class SpokenRow:
    """A prompt, the ids behind it (codes and the end), and which word of it each code is of."""

    prompt: list[int]
    speech: list[int]
    places: list[int]  # of one code each, counted in the prompt


@dataclass(frozen=True)
class SpokenBatch:
    """Rows of one batch, padded behind their ends; `IGNORED` for prompts and padding."""

    ids: Tensor  # (B, L)
    labels: Tensor  # (B, L)
    words: Tensor  # (B, L, 2) the word that a code is of, and the one behind it


@torch.no_grad()
def coded(codec: Xcodec2Model, heard: CodecInput) -> list[int]:
    """The codes of an utterance."""
    parts = codec.quantizer
    _, codes = parts(hidden(codec, heard.features[None]))
    found: list[int] = codes[0, :, 0].tolist()
    return found


def rows(spoken: Sequence[CorpusUtterance], codes: Sequence[Sequence[int]]) -> list[SpokenRow]:
    """What a model learns from utterances and their codes."""
    where = models.layout()
    found = []
    for one, said in zip(spoken, codes, strict=True):
        places = spans(one.text.split(), len(said))
        speech = [*(where.first + code for code in said), where.end]
        prompt = models.prompt(one.text, one.speaker)
        found.append(SpokenRow(prompt, speech, [1 + place for place in places]))
    return found


def batches(pool: Sequence[SpokenRow], size: int, seed: int) -> Iterator[SpokenBatch]:
    """Batches without end, of rows about as long as each other."""
    ordered = sorted(pool, key=lambda row: len(row.prompt) + len(row.speech))
    groups = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    for number in shuffled(len(groups), 1, np.random.default_rng(seed)):
        yield _padded(groups[int(number[0])])


def _padded(group: Sequence[SpokenRow]) -> SpokenBatch:
    length = max(len(row.prompt) + len(row.speech) for row in group)
    ids = torch.zeros(len(group), length, dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    words = torch.full((*ids.shape, 2), IGNORED)
    for place, row in enumerate(group):
        whole = torch.tensor([*row.prompt, *row.speech])
        ids[place, : len(whole)] = whole
        labels[place, len(row.prompt) : len(whole)] = whole[len(row.prompt) :]
        at = torch.tensor(row.places)
        pair = whole[torch.stack((at, at + 1), -1)]
        words[place, len(row.prompt) : len(whole) - 1] = pair
    return SpokenBatch(ids, labels, words)


def learn_to_speak(
    model: LlamaForCausalLM,
    taught: Iterator[SpokenBatch],
    fall: Fall,
    course: Course,
    named: float = 0.0,
) -> None:
    """Train a model on speech.

    With `named` its states at two thirds of its depth are also asked, so strongly, which word they
    say and which comes next, by a head that is dropped afterwards: so it learns where it is in the
    text, which the codes alone teach it late.
    """
    model.train()
    naming = nn.Linear(model.config.hidden_size, 2 * models.layout().first)
    matrices, others = divided(model.model.layers, model.parameters())
    if named:
        others = [*others, *naming.parameters()]

    def loss_of(batch: SpokenBatch) -> Tensor:
        return loss(model, batch, naming if named else None, named)

    fit(others, taught, loss_of, fall, "speak", course, matrices)
    model.train(False)


def loss(
    model: LlamaForCausalLM, batch: SpokenBatch, naming: nn.Module | None = None, named: float = 0.0
) -> Tensor:
    """Cross entropy of codes and ends, and `named` times that of the words they are of."""
    out = model(input_ids=batch.ids, use_cache=False, output_hidden_states=naming is not None)
    total = _entropy(out.logits[:, :-1], batch.labels[:, 1:])
    if naming is not None:
        assert out.hidden_states is not None
        states = out.hidden_states[2 * model.config.num_hidden_layers // 3][:, :-1]
        said = naming(functional.layer_norm(states, states.shape[-1:])).unflatten(-1, (2, -1))
        total = total + named * _entropy(said, batch.words[:, 1:])
    return total


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:  # (..., V), (...) -> ()
    return functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED
    )
