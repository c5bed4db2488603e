"""Train `image-sketch`: a small Janus of small pictures, and a resampler to those of the target.

The language model learns from scenes, as the target's does. The resampler learns what the target's
picture part codes things as, then the target's distributions of such codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mmspec.api import accelerate
from mmspec.modalities.image.checkpoints import load
from mmspec.modalities.image.families import image_family
from mmspec.modality import Entry
from mmspec.models.code_resampler import FOLDER
from mmspec.training.fitting import Course, Fall, fit
from mmspec.training.reporting import Report
from mmspec.zoo.boards import BOARD_CLASSES, board_loss
from mmspec.zoo.prompts import MOST, prompts
from mmspec.zoo.training import kept, teacher
from tools.zoo.image import models
from tools.zoo.image.evaluate import drawn_codes
from tools.zoo.image.low_resolution_coding import SMALL, kinds, learn_kinds, parts_of
from tools.zoo.image.low_resolution_resampling import (
    coded_scenes,
    drawn_scenes,
    learn_to_enlarge,
    untrained,
)
from tools.zoo.image.training import (
    CodeLesson,
    PromptEncoder,
    busy_scenes,
    drawing_weights,
    lessons,
    states_of,
)

ABOUT = f"""\
Draws the Scene world of the `mmspec` zoo in {SMALL.pixels} x {SMALL.pixels} pixels, \
{SMALL.side} x {SMALL.side} codes out of
{SMALL.codes}: one for every name, colour and size of a thing, and one for blank paper. Drafts for
`image` under the recipe `mulo-sd`. The resampler between the codes of both lies in the
folder `{FOLDER}`.
"""
NOTES = f"""\
`things` and `blanks` are the shares of codes right in small pictures of held-out
prompts, where these say that there is something and where there is nothing. `codes per
call` are codes of the target's pictures over its calls with `mulo-sd` as it is, which
is lossy, and `exact` with `verifier="coupled"`. All are measured on the float16
weights, run in float32, at temperature 1 and guidance {models.GUIDANCE}.
"""
HELD_OUT = 64
SHAPE = models.ImageShape(layers=3, width=96, inner=192, heads=3)
BATCH = 64
_TARGET = "image"
_FEW = 8  # pictures that a short trial learns enlarging from, for every step


@dataclass(frozen=True)
class LowResolutionPlan:
    """Steps of each stage, and how many scenes each sees."""

    seeing: int = 700
    drawing: int = 2000
    pool: int = 16384
    enlarging: int = 600
    coded: int = 4096
    following: int = 800
    watched: int = 1536


PLANS = {"image-sketch": LowResolutionPlan()}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach the small model to draw, then the resampler to enlarge what it draws."""
    plan, target, words = PLANS[entry.name], teacher(_TARGET), models.processor()
    processor, course = models.processor(SMALL), Course(seed, steps, progress)
    model: Any = models.janus(SHAPE, processor.tokenizer, SMALL)
    learn_kinds(model.model.vqmodel, plan.seeing, course)
    scenes = list(islice(busy_scenes(seed, MOST), course.cut(plan.pool, BATCH)))
    taught = lessons(scenes, kinds(scenes), PromptEncoder(processor.tokenizer), BATCH, seed)
    learn_to_draw_kinds(model, taught, Fall(plan.drawing, 2e-3), course)
    resampler: Any = untrained(image_family(target).codebook, image_family(model).codebook)

    def save() -> None:
        model.half().save_pretrained(folder)
        processor.save_pretrained(folder)
        resampler.half().save_pretrained(folder / FOLDER)

    with kept(save):
        seen = coded_scenes(target.model.vqmodel, course.cut(plan.coded, _FEW), course)
        learn_to_enlarge(resampler, seen, Fall(plan.enlarging, 3e-3), course)
        count = course.cut(plan.watched, _FEW)
        seen = drawn_scenes(resampler, target, words, count, course.later(1))
        learn_to_enlarge(resampler, seen, Fall(plan.following, 2e-3), course)
    return {
        "steps": course.cut(plan.drawing),
        "parameters": sum(p.numel() for part in (model, resampler) for p in part.parameters()),
    }


def learn_to_draw_kinds(
    model: Any, taught: Iterator[CodeLesson], fall: Fall, course: Course
) -> None:
    """Train the language model on codes, and on the name, colour and size that each stands for.

    The parts are what a prompt says, and are found in it long before their combinations.
    """
    heads = nn.Linear(model.config.text_config.hidden_size, sum(BOARD_CLASSES))

    def loss_of(lesson: CodeLesson) -> torch.Tensor:
        states = states_of(model, lesson.prompts, lesson.codes)
        logits = model.model.generation_head(states).flatten(0, 1)
        missed = functional.cross_entropy(logits, lesson.codes.flatten())
        return missed + board_loss(heads(states), parts_of(lesson.codes))

    matrices, others = drawing_weights(model)
    others = [*others, *heads.parameters()]
    fit(others, taught, loss_of, fall, "draw", course, matrices)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Codes right in small pictures, and codes per target call of exact and of lossy drafting."""
    asked, small, target = prompts(count, "held-out"), load(entry, folder), teacher(_TARGET)
    drawn = drawn_codes(small, models.processor(SMALL), [one.text for one in asked])
    wanted = kinds([one.scene for one in asked])
    report = {
        name: round(float((drawn == wanted)[side].float().mean()), 4)
        for name, side in {"things": wanted > 0, "blanks": wanted == 0}.items()
    }
    for name, verifier in (("codes_per_call_exact", "coupled"), ("codes_per_call", None)):
        given: dict[str, Any] = {"processor": models.processor(), "verifier": verifier}
        fast = accelerate(target, "mulo-sd", drafter=small, **given)
        calls = []
        for number, one in enumerate(asked):
            made = fast.generate_images(
                prompt=one.text, temperature=1.0, guidance=models.GUIDANCE, seed=number
            )
            calls.append(made.stats.target_calls)
        report[name] = round(models.SIDE**2 / fmean(calls), 2)
    return report
