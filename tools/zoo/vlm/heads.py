"""Train the heads of the zoo: they follow a language target by the states that it has anyway."""

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
from mmspec.modalities.common.families import reader as reader_of
from mmspec.modalities.vlm.checkpoints import load
from mmspec.modality import Entry
from mmspec.models.fingerprint import sign
from mmspec.targets.readers.reader import Reader
from mmspec.training.ahead import MEDUSA
from mmspec.training.fitting import Course, Fall, divided, fit
from mmspec.training.heads import Lesson
from mmspec.training.reporting import Report
from mmspec.training.self_fed import EAGLE3, HASS, aligned_loss
from mmspec.training.trainable import HeadTraining, learnt
from mmspec.zoo.boards import pixels
from mmspec.zoo.language import scenes, write
from mmspec.zoo.training import kept, teacher
from tools.zoo.vlm.batches import Encoder, Sample, grouped
from tools.zoo.vlm.distil import MAX_NEW_TOKENS, said_by
from tools.zoo.vlm.families import FAMILIES

ABOUT = """\
Continues what its target has read; knows only the Scene world of the `mmspec` zoo, and fits no
other target.

Learned from what its target says about training scenes.
"""
NOTES = """\
`acceptance length` is tokens per round of greedy chain speculation with five drafted tokens, and
`deep acceptance length` with as many as the head is meant for (`drafted`), on held-out scenes,
captions and answers to questions as they come. Measured by decoding with the float16 weights, run
in float32.
"""
HELD_OUT = 128
BATCH = 32


@dataclass(frozen=True)
class HeadPlan:
    """How a head is made: by whose training, and with what configuration."""

    recipe: str  # whose chains it is measured by
    training: HeadTraining
    fall: Fall
    drafted: int  # tokens of a chain that it is meant for
    pool: int = 4096  # answers of the target that it learns from
    changes: Mapping[str, Any] = field(default_factory=dict)


FEATURE = HeadPlan(
    "hass",
    replace(HASS, loss=partial(aligned_loss, passes=5)),
    Fall(900, 2e-3),
    8,
    pool=3072,
    changes={"intermediate_size": 384},
)
_EAGLE3 = HeadPlan("eagle-3", EAGLE3, Fall(1200, 2e-3), 8, changes={"intermediate_size": 384})
PLANS = {
    "llava-eagle3": _EAGLE3,
    "llava-feature-head": FEATURE,
    "llava-medusa": HeadPlan("medusa", MEDUSA, Fall(500, 2e-3), 5, 2048, {"medusa_num_heads": 5}),
    "qwen2.5-vl-eagle3": replace(_EAGLE3, fall=Fall(700, 2e-3), pool=2048),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Let the target talk about training scenes, and teach a head to say the same."""
    assert entry.target is not None
    plan, course = PLANS[entry.name], Course(seed, steps, progress)
    target, encoder = teacher(entry.target), _encoder(entry.target)
    said = said_by(target, encoder, course.cut(plan.pool, BATCH), course)
    given = lessons(said, encoder, BATCH, seed)
    return {"answers": len(said), **teach(plan, reader_of(target), given, folder, course)}


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Tokens per round at five drafted tokens, and at as many as the head is meant for."""
    assert entry.target is not None
    asked = list(held_out(_encoder(entry.target), count))
    return lengths(PLANS[entry.name], teacher(entry.target), load(entry, folder), asked)


def teach(
    plan: HeadPlan, reader: Reader, given: Iterator[Lesson], folder: Path, course: Course
) -> dict[str, int]:
    """Teach a new head of a target, and write it in float16; figures of how it was made."""
    counts = torch.zeros(reader.vocabulary, dtype=torch.int64)
    head: Any = plan.training.begin(reader, counts, **plan.changes).train()

    def finish() -> None:
        sign(head.train(False), reader)
        head.half().save_pretrained(folder)

    with kept(finish):
        matrices, others = divided(head, learnt(head))
        fit(
            others,
            given,
            lambda lesson: plan.training.loss(reader, head, lesson),
            *(plan.fall, "head", course, matrices),
        )
    return {
        "steps": course.cut(plan.fall.steps),
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def lengths(
    plan: HeadPlan,
    target: Any,
    head: Any,
    asked: Sequence[Mapping[str, Any]],
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, float]:
    """Tokens per round over requests: of five drafted tokens, and of the plan's number."""
    drafted = {"acceptance_length": 5, "deep_acceptance_length": plan.drafted}
    found = {
        name: acceptance(target, plan.recipe, head, asked, length, max_new_tokens)
        for name, length in drafted.items()
    }
    return {**found, "drafted": plan.drafted}


def acceptance(
    target: Any,
    recipe: str,
    head: Any,
    asked: Sequence[Mapping[str, Any]],
    length: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> float:
    """Mean acceptance length of greedy chains of `length` drafted tokens over requests."""
    fast = accelerate(target, recipe, drafter=head, length=length)
    accepted = rounds = 0
    for inputs in asked:
        stats = fast.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens).stats
        accepted += stats.num_accepted_draft_tokens
        rounds += stats.num_spec_steps
    return round(1 + accepted / max(rounds, 1), 2)


def held_out(encoder: Encoder, count: int) -> Iterator[dict[str, Tensor]]:
    """Requests about held-out scenes, one at a time."""
    for scene, number in scenes(count, "held-out", seed=1):
        prompt, answer, _ = write(scene, number)
        yield inputs_of([Sample(pixels(scene), prompt, answer)], encoder)


def inputs_of(samples: Sequence[Sample], encoder: Encoder) -> dict[str, Tensor]:
    """What `generate` takes: prompts padded on the left, and their pictures."""
    ids, mask = encoder.prompts(samples)
    inputs = {"input_ids": ids, "attention_mask": mask}
    inputs |= encoder.family.image_inputs(np.stack([one.image for one in samples]))
    if encoder.family.positions_from_types:
        token = encoder.tokenizer.convert_tokens_to_ids(encoder.family.image_token)
        inputs["mm_token_type_ids"] = (ids == token).int()
    return inputs


def lessons(said: Sequence[Sample], encoder: Encoder, batch: int, seed: int) -> Iterator[Lesson]:
    """The target's answers in batches without end, all of them before any comes again."""
    generator = np.random.default_rng((seed, 4))
    while True:
        for part in grouped(said, batch, generator):
            answers = encoder.tokenizer([one.answer for one in part]).input_ids
            rows = [[*answer, encoder.tokenizer.eos_token_id] for answer in answers]
            longest = max(map(len, rows))
            tokens = [row + [-1] * (longest - len(row)) for row in rows]
            yield Lesson(inputs_of(part, encoder), torch.tensor(tokens))


def _encoder(target: str) -> Encoder:
    return Encoder(FAMILIES[target], FAMILIES[target].build_processor())
