"""Train the bundled heads: draft heads on the hidden states of a language target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.api import accelerate
from mmspec.modalities.common.families import make_reader
from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.models.compatibility import sign_head
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import (
    CosineDecay,
    TrainingProgress,
    TrainingRun,
    fit,
    split_parameters,
)
from mmspec.training.heads import TrainingExample
from mmspec.training.medusa_hydra import MEDUSA
from mmspec.training.self_fed import EAGLE3, HASS, aligned_loss
from mmspec.training.trainable import HeadTraining, trainable_parameters
from mmspec.zoo.language import scenes, write
from mmspec.zoo.scene_tensors import render_pixels
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vlm.batches import Encoder, Sample, group_by_length
from tools.zoo.vlm.distillation import MAX_NEW_TOKENS, sample_target_responses
from tools.zoo.vlm.families import FAMILIES

ABOUT = """\
Predicts the next tokens from its target's states; knows only the Scene world of the `mmspec` zoo,
and fits no other target.

Trained on its target's answers about training scenes.
"""
NOTES = """\
`acceptance length` is tokens per round of greedy chain speculation with five drafted tokens, and
`deep acceptance length` with the number that the head is trained for (`drafted`), on held-out
scenes, captions and answers to questions as they come. Measured by decoding with the float16
weights, run in float32.
"""
HELD_OUT = 128
BATCH = 32


@dataclass(frozen=True)
class HeadPlan:
    """Training plan of a head."""

    recipe: str  # recipe of the evaluation
    training: HeadTraining
    decay: CosineDecay
    drafted: int  # draft tokens that it is trained for
    pool: int = 4096  # answers of the target that it is trained on
    changes: Mapping[str, Any] = field(default_factory=dict)


FEATURE = HeadPlan(
    "hass",
    replace(HASS, loss=partial(aligned_loss, passes=5)),
    CosineDecay(900, 2e-3),
    8,
    pool=3072,
    changes={"intermediate_size": 384},
)
_EAGLE3 = HeadPlan(
    "eagle-3",
    EAGLE3,
    CosineDecay(1200, 2e-3),
    8,
    changes={"intermediate_size": 384, "visual_slots": "fused", "positions": "keep"},
)
PLANS = {
    "llava-eagle3": _EAGLE3,
    "llava-feature-head": FEATURE,
    "llava-medusa": HeadPlan(
        "medusa", MEDUSA, CosineDecay(500, 2e-3), 5, 2048, {"medusa_num_heads": 5}
    ),
    "qwen2.5-vl-eagle3": replace(_EAGLE3, decay=CosineDecay(700, 2e-3), pool=2048),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Generate answers of the target to prompts about training scenes, and train a head on them."""
    assert entry.target is not None
    plan, course = PLANS[entry.name], TrainingRun(seed, steps, progress)
    target, encoder = load_teacher(entry.target), _encoder(entry.target)
    answers = sample_target_responses(target, encoder, course.limit_steps(plan.pool, BATCH), course)
    examples = iterate_examples(answers, encoder, BATCH, seed)
    return {
        "answers": len(answers),
        **train_head(plan, make_reader(target), examples, folder, course),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return acceptance lengths at five draft tokens, and at the number of the plan."""
    assert entry.target is not None
    requests = list(iterate_requests(_encoder(entry.target), count))
    return measure_lengths(
        PLANS[entry.name], load_teacher(entry.target), load(entry, folder), requests
    )


def train_head(
    plan: HeadPlan,
    reader: Reader,
    examples: Iterator[TrainingExample],
    folder: Path,
    course: TrainingRun,
) -> dict[str, int]:
    """Train a new head for a target, and write it in float16; returns figures of the training."""
    counts = torch.zeros(reader.vocabulary, dtype=torch.int64)
    head: Any = plan.training.begin(reader, counts, **plan.changes).train()

    def finish() -> None:
        sign_head(head.train(False), reader)
        head.half().save_pretrained(folder)

    with save_on_exit(finish):
        matrices, others = split_parameters(head, trainable_parameters(head))
        fit(
            others,
            examples,
            lambda example: plan.training.loss(reader, head, example),
            *(plan.decay, "head", course, matrices),
        )
    return {
        "steps": course.limit_steps(plan.decay.steps),
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def measure_lengths(
    plan: HeadPlan,
    target: Any,
    head: Any,
    requests: Sequence[Mapping[str, Any]],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, float]:
    """Return acceptance lengths over requests, at five draft tokens and at the plan's number."""
    drafted = {"acceptance_length": 5, "deep_acceptance_length": plan.drafted}
    found = {
        name: acceptance(target, plan.recipe, head, requests, length, max_new_tokens)
        for name, length in drafted.items()
    }
    return {**found, "drafted": plan.drafted}


def acceptance(
    target: Any,
    recipe: str,
    head: Any,
    requests: Sequence[Mapping[str, Any]],
    length: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> float:
    """Return the mean acceptance length of greedy chains of `length` draft tokens over requests."""
    fast = accelerate(target, recipe, drafter=head, length=length)
    accepted = rounds = 0
    for inputs in requests:
        stats = fast.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens).stats
        accepted += stats.num_accepted_draft_tokens
        rounds += stats.num_spec_steps
    return round(1 + accepted / max(rounds, 1), 2)


def iterate_requests(encoder: Encoder, count: int) -> Iterator[dict[str, Tensor]]:
    """Iterate over requests about held-out scenes, one at a time."""
    for scene, number in scenes(count, "held-out", seed=1):
        prompt, answer, _ = write(scene, number)
        yield make_inputs([Sample(render_pixels(scene), prompt, answer)], encoder)


def make_inputs(samples: Sequence[Sample], encoder: Encoder) -> dict[str, Tensor]:
    """Return inputs of `generate`: prompts padded on the left, and their images."""
    ids, mask = encoder.prompts(samples)
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs |= encoder.family.image_inputs(np.stack([one.image for one in samples]))
    if encoder.family.positions_from_types:
        token = encoder.tokenizer.convert_tokens_to_ids(encoder.family.image_token)
        inputs["mm_token_type_ids"] = (ids == token).int()
    return inputs


def iterate_examples(
    samples: Sequence[Sample], encoder: Encoder, batch: int, seed: int
) -> Iterator[TrainingExample]:
    """Iterate over batches of the target's answers, epoch after epoch."""
    generator = np.random.default_rng((seed, 4))
    while True:
        for part in group_by_length(samples, batch, generator):
            answers = encoder.tokenizer([one.answer for one in part]).input_ids
            rows = [[*answer, encoder.tokenizer.eos_token_id] for answer in answers]
            longest = max(map(len, rows))
            tokens = [row + [-1] * (longest - len(row)) for row in rows]
            yield TrainingExample(make_inputs(part, encoder), torch.tensor(tokens))


def _encoder(target: str) -> Encoder:
    return Encoder(FAMILIES[target], FAMILIES[target].build_processor())
