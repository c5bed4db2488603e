"""Train the text pair: a Llama that reads a list of things, and a small one that drafts for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mmspec.api import accelerate
from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.training.fitting import (
    CosineDecay,
    TrainingProgress,
    TrainingRun,
    fit,
    split_parameters,
)
from mmspec.zoo.requests import CATEGORIES, requests
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.initialization import expand_blocks, mimetic_init
from tools.zoo.vlm.architecture import LanguageShape, llava
from tools.zoo.vlm.batches import IGNORED, Batch
from tools.zoo.vlm.conversations import ConversationEncoder, make_inputs
from tools.zoo.vlm.processors import text_tokenizer
from tools.zoo.vlm.requests import (
    MAX_NEW_TOKENS,
    Stage,
    iterate_conversations,
    measure_answers,
    train_on_conversations,
    weight_words,
)
from tools.zoo.vlm.train import save

ABOUT = """\
Knows only the Scene world of the `mmspec` zoo, as text: a prompt lists the things on a board,
"small red circle top left, large blue digit two center.", and goes on with a request of one of six
kinds (short questions, digits, captions, charts, reasoning, conversations of four turns). Wordings
and orders are drawn at random in the training data, so plain sampling varies.

The target is trained on random scenes with few layers, then with all of them. The draft model is
trained on such answers, then on the distributions of its target over them.
"""
NOTES = """\
`facts` is the share of correct facts in greedy answers about held-out scenes, by category; the
turns of a conversation follow the model's own answers. `entropy` is that of the next token in plain
sampling at temperature 1, in nats, and `tokens` the mean length of a sampled answer, of a
conversation of all four. `acceptance length` is tokens per round of greedy chain speculation with
five drafted tokens; of a conversation, of its first turn. All are measured on the float16 weights,
run in float32, on held-out scenes.
"""
HELD_OUT = 40  # requests of each category
LENGTH = 5  # drafted tokens in the evaluation
POSITIONS = 1024


@dataclass(frozen=True)
class TextPlan:
    """Training plan: with `shallow` layers on requests, then with all.

    The last stage of a draft model is on the distributions of its target.
    """

    shape: LanguageShape
    shallow: int
    first: Stage
    last: Stage


PLANS = {
    "text": TextPlan(
        LanguageShape(12, 96, 224, 3),
        4,
        Stage(CosineDecay(1700, 1.5e-3), 4.0),
        Stage(CosineDecay(450, 8e-4), 2.0),
    ),
    "text-drafter": TextPlan(
        LanguageShape(1, 96, 192, 3),
        1,
        Stage(CosineDecay(900, 3e-3)),
        Stage(CosineDecay(250, 1.5e-3)),
    ),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train the target on requests of six kinds, or the draft model on the target's outputs."""
    plan, course = PLANS[entry.name], TrainingRun(seed, steps, progress)
    tokenizer = text_tokenizer()
    encoder = ConversationEncoder(None, tokenizer)
    model = build(replace(plan.shape, layers=plan.shallow), tokenizer)
    mimetic_init(model.model.layers)
    batches = iterate_conversations(encoder, seed)

    def train_on(stage: Stage) -> None:
        weights = weight_words(tokenizer, stage.weight)
        train_on_conversations(model, None, batches, stage, weights, course)

    with save_on_exit(lambda: save(model, tokenizer, folder, sees=False)):
        train_on(plan.first)
        if entry.target is None:
            model = deepen(model, plan.shape, tokenizer)
            train_on(plan.last)
        else:
            distil(model, load_teacher(entry.target), batches, plan.last, course)
    return {
        "steps": sum(course.limit_steps(one.decay.steps) for one in (plan.first, plan.last)),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def build(shape: LanguageShape, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Build a Llama of narrow layers."""
    model: Any = llava(shape, tokenizer)
    model.config.max_position_embeddings = POSITIONS
    model.train()
    found: LlamaForCausalLM = model
    return found


@torch.no_grad()
def deepen(
    model: LlamaForCausalLM, shape: LanguageShape, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Expand a model to more layers without changing its outputs."""
    deep = build(shape, tokenizer)
    weights = {k: v for k, v in model.state_dict().items() if "model.layers." not in k}
    deep.load_state_dict(weights, strict=False)
    expand_blocks(model.model.layers, deep.model.layers)
    return deep


def distil(
    model: LlamaForCausalLM,
    target: PreTrainedModel,
    batches: Iterator[Batch],
    stage: Stage,
    course: TrainingRun,
) -> None:
    """Train on the target's distributions of next tokens over the answers of training requests."""

    def loss_of(batch: Batch) -> Tensor:
        is_answer = batch.labels[:, 1:] != IGNORED
        with torch.no_grad():
            wanted = target(input_ids=batch.ids, use_cache=False).logits[:, :-1][is_answer]
        found = model(input_ids=batch.ids, use_cache=False).logits[:, :-1][is_answer]
        return functional.cross_entropy(found.float(), wanted.float().softmax(-1))

    matrices, others = split_parameters(model.model.layers, model.parameters())
    fit(others, batches, loss_of, stage.decay, "distil", course, matrices, floor=0.02)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return the figures of a target's answers, or acceptance lengths of a draft model."""
    encoder = ConversationEncoder(None, text_tokenizer())
    if entry.target is None:
        return measure_answers(load(entry, folder), encoder, count)
    return acceptance(load_teacher(entry.target), folder, encoder, count)


def acceptance(
    target: PreTrainedModel, folder: Path, encoder: ConversationEncoder, count: int
) -> dict[str, float]:
    """Return tokens per round of greedy chains, by category and over all rounds."""
    fast = accelerate(target, "coupled", drafter=folder, length=LENGTH)
    report: dict[str, float] = {}
    accepted = rounds = 0
    for category in CATEGORIES:
        asked = requests(count, "held-out", seed=1, category=category)
        inputs = make_inputs(encoder, asked, [()] * count)
        stats = fast.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS).stats
        report[f"acceptance length of {category}"] = round(stats.mean_acceptance_length, 3)
        accepted += stats.num_accepted_draft_tokens
        rounds += stats.num_spec_steps
    return {**report, "acceptance length": round(1 + accepted / rounds, 3)}
