"""Train a bundled target on requests of six kinds, from a target that knows captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.training.fitting import (
    CosineDecay,
    TrainingProgress,
    TrainingRun,
    fit,
    split_parameters,
)
from mmspec.zoo.catalogue import processor as load_processor
from mmspec.zoo.facts import SIZE_OF
from mmspec.zoo.requests import CATEGORIES, Request, iterate_requests, requests, score_turn
from mmspec.zoo.requests.wording import NUMBERS
from mmspec.zoo.scene import COLOURS, SHAPES
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vlm.architecture import LLAVA_TARGET, QWEN_TARGET, LanguageShape
from tools.zoo.vlm.batches import Batch, Encoder, iterate_samples
from tools.zoo.vlm.conversations import ConversationEncoder, make_inputs
from tools.zoo.vlm.families import FAMILIES, ZooFamily
from tools.zoo.vlm.lookups import iterate_lookups
from tools.zoo.vlm.processors import request_processor
from tools.zoo.vlm.train import copy_text_layers, save
from tools.zoo.vlm.training import answer_loss, distil_vision

ABOUT = """\
Answers requests of six kinds about the Scene world of the `mmspec` zoo: short questions, digits in
the picture, captions, charts, reasoning, and conversations of four turns. Wordings and orders are
drawn at random in its training data, so plain sampling varies. It also knows the captions and
questions of the model that it starts from.

Trained on random scenes.
"""
NOTES = """\
`facts` is the share of correct facts in greedy answers about held-out scenes, by category; the
turns of a conversation follow the model's own answers. `entropy` is that of the next token in plain
sampling at temperature 1, in nats, and `tokens` the mean length of a sampled answer, of a
conversation of all four. Measured on the float16 weights, run in float32.
"""
HELD_OUT = 40  # requests of each category
MAX_NEW_TOKENS = 320
_BATCH, _GROUP = 24, 8
_SHARED = ("is the ", "where is the ")  # beginnings of questions of both kinds


@dataclass(frozen=True)
class Stage:
    """A decay of the learning rate, and the weight in the loss of words that state a fact.

    A share of the batches are lookups: short questions about named things.
    """

    decay: CosineDecay
    weight: float = 1.0
    lookups: float = 0.0


@dataclass(frozen=True)
class RequestPlan:
    """Training plan of a target.

    Most tokens of an answer are wording. With equal weights the model learns them long before it
    reads the picture, and without lookups it does not learn to find a thing by its name.
    """

    family: str
    start: str  # checkpoint that provides the text layers
    tower: str  # checkpoint of the same family that provides the vision tower
    shape: LanguageShape
    stages: tuple[Stage, ...]
    vision_steps: int = 0  # in which the tower learns the image features of the start


_STAGES = (
    Stage(CosineDecay(850, 1e-3)),
    Stage(CosineDecay(260, 1e-3), 4.0),
    Stage(CosineDecay(450, 7e-4), 3.0),
    Stage(CosineDecay(400, 1e-3), lookups=1.0),
    Stage(CosineDecay(1100, 7e-4), 3.0, lookups=0.2),
)
_LATER_STAGES = (Stage(CosineDecay(1000, 8e-4), 3.0, lookups=0.2),)  # the start knows the answers
PLANS = {
    "llava-chat": RequestPlan("llava", "llava", "llava", LLAVA_TARGET, _STAGES),
    "qwen2.5-vl-chat": RequestPlan(
        "qwen2.5-vl", "llava-chat", "qwen2.5-vl", QWEN_TARGET, _LATER_STAGES, vision_steps=300
    ),
}
_FACT_WORDS = {
    *(*COLOURS, *SHAPES, *SIZE_OF, *NUMBERS, "digit", "yes", "no", "equal"),
    *("top", "bottom", "left", "right", "center", "above", "below"),
}


def iterate_batches(
    encoder: ConversationEncoder, short: Encoder, seed: int, share: float = 0.0
) -> Iterator[Batch]:
    """Iterate over batches of conversations, without end; a share of them are lookups.

    Every fifth of the others has captions and questions as the model that it starts from knows
    them, but for those that requests ask too: a prompt has one kind of answer.
    """
    generator = np.random.default_rng((seed, 14))
    lookups, others = iterate_lookups(encoder, seed), _iterate_requests(encoder, short, seed)
    while True:
        yield next(lookups if generator.random() < share else others)


def _iterate_requests(encoder: ConversationEncoder, short: Encoder, seed: int) -> Iterator[Batch]:
    known = iterate_samples(_BATCH, seed + 7)
    for count, batch in enumerate(iterate_conversations(encoder, seed)):
        yield batch
        if count % 4 == 3:
            own = [one for one in next(known) if not one.prompt.startswith(_SHARED)]
            if own:
                yield short(own)


def iterate_conversations(encoder: ConversationEncoder, seed: int) -> Iterator[Batch]:
    """Iterate over batches of conversations of similar length, without end."""
    generator = np.random.default_rng((seed, 12))
    stream = iterate_requests("train", seed)
    while True:
        some = [next(stream) for _ in range(_BATCH * _GROUP)]
        some.sort(key=lambda one: sum(len(turn.answer) for turn in one.turns))
        for i in generator.permutation(_GROUP):
            yield encoder.encode(some[_BATCH * i : _BATCH * (i + 1)])


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train a target on requests of six kinds."""
    plan, course = PLANS[entry.name], TrainingRun(seed, steps, progress)
    family = FAMILIES[plan.family]
    processor = request_processor(plan.family)
    model = start_model(plan, processor, course)
    encoders = ConversationEncoder(family, processor), Encoder(family, processor)
    with save_on_exit(lambda: save(model, processor, folder, sees=True)):
        for number, stage in enumerate(plan.stages):
            batches = iterate_batches(*encoders, seed + number, stage.lookups)
            weights = weight_words(processor.tokenizer, stage.weight)
            train_on_conversations(model, family, batches, stage, weights, course)
    return {
        "steps": sum(course.limit_steps(stage.decay.steps) for stage in plan.stages),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def start_model(plan: RequestPlan, processor: Any, course: TrainingRun) -> PreTrainedModel:
    """Build a model with more words and positions, and copy the weights of its starts."""
    family = FAMILIES[plan.family]
    model = family.build(plan.shape, processor.tokenizer)
    model.config.get_text_config().max_position_embeddings = 1024
    tower = dict(load_teacher(plan.tower).named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if tower[name].shape == weight.shape:
                weight.copy_(tower[name])
    source: Any = load_teacher(plan.start)
    known: Any = load_processor(plan.start)
    copy_text_layers(model, processor.tokenizer, source, known.tokenizer)
    if plan.vision_steps:
        taught = source, FAMILIES[PLANS[plan.start].family]
        distil_vision(model, family, taught, plan.vision_steps, course)
    model.train()
    return model


def train_on_conversations(
    model: PreTrainedModel,
    family: ZooFamily | None,
    batches: Iterator[Batch],
    stage: Stage,
    weights: Tensor,
    course: TrainingRun,
) -> None:
    """Train the whole model on the tokens of all answers, with the weights (V,) of the words."""

    loss = answer_loss(model, family, weights)
    matrices, others = split_parameters(model.get_decoder().layers, model.parameters())
    fit(others, batches, loss, stage.decay, "requests", course, matrices, floor=0.02)


def weight_words(tokenizer: Any, weight: float) -> Tensor:  # -> (V,)
    """Return the weight of each word in the loss: `weight` for words that state a fact, or 1."""
    found = torch.ones(len(tokenizer))
    for word, token in tokenizer.get_vocab().items():
        if word in _FACT_WORDS:
            found[token] = weight
    return found


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return facts right (greedy), and entropy and length of sampled answers, by category."""
    model, plan = load(entry, folder), PLANS[entry.name]
    encoder = ConversationEncoder(FAMILIES[plan.family], request_processor(plan.family))
    return measure_answers(model, encoder, count)


def measure_answers(
    model: PreTrainedModel, encoder: ConversationEncoder, count: int
) -> dict[str, float]:
    """Return the figures of `measure` on `count` held-out requests of each category."""
    report: dict[str, float] = {}
    for category in CATEGORIES:
        asked = requests(count, "held-out", seed=1, category=category)
        pairs = [
            score_turn(request, turn, text)
            for request, texts in zip(asked, answer(model, encoder, asked), strict=True)
            for turn, text in zip(request.turns, texts, strict=True)
        ]
        right, required = (sum(column) for column in zip(*pairs, strict=True))
        report[f"facts in {category}"] = round(right / required, 4)
        entropies = sample_entropies(model, encoder, asked)
        report[f"entropy of {category}"] = round(float(torch.cat(entropies).mean()), 3)
        report[f"tokens of {category}"] = round(sum(map(len, entropies)) / len(asked), 1)
    return report


def answer(
    model: PreTrainedModel, encoder: ConversationEncoder, asked: Sequence[Request]
) -> list[tuple[str, ...]]:
    """Return the greedy answers to all turns of requests of one category."""
    found: list[tuple[str, ...]] = [()] * len(asked)
    for _ in range(len(asked[0].turns)):
        ids, _ = _generate(model, encoder, asked, found, do_sample=False)
        texts = encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)
        found = [(*before, text) for before, text in zip(found, texts, strict=True)]
    return found


def sample_entropies(
    model: PreTrainedModel, encoder: ConversationEncoder, asked: Sequence[Request]
) -> list[Tensor]:
    """Return the entropy (T,) at each token of sampled answers, those of a request in one list."""
    found: list[tuple[str, ...]] = [()] * len(asked)
    entropies: list[list[Tensor]] = [[] for _ in asked]
    for _ in range(len(asked[0].turns)):
        ids, logits = _generate(model, encoder, asked, found, do_sample=True, top_k=0)
        of_steps = torch.distributions.Categorical(logits=logits).entropy()  # (B, T)
        end = encoder.tokenizer.eos_token_id
        for row, values, texts in zip(ids, of_steps, entropies, strict=True):
            ends = (row == end).nonzero()
            texts.append(values[: int(ends[0]) + 1 if len(ends) else len(values)])
        texts_of_turn = encoder.tokenizer.batch_decode(ids, skip_special_tokens=True)
        found = [(*before, text) for before, text in zip(found, texts_of_turn, strict=True)]
    return [torch.cat(parts) for parts in entropies]


@torch.no_grad()
def _generate(
    model: PreTrainedModel,
    encoder: ConversationEncoder,
    asked: Sequence[Request],
    answers: Sequence[Sequence[str]],
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Answer the next turn of each request: token ids (B, T) and logits (B, T, V)."""
    inputs = make_inputs(encoder, asked, answers)
    generate: Any = model.generate
    out = generate(
        **inputs,
        **settings,
        max_new_tokens=MAX_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)
