"""Train the autoregressive image checkpoints of the zoo from a seed, on one CPU core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mmspec.api import accelerate
from mmspec.modalities.image.checkpoints import load
from mmspec.modalities.image.families import reader as reader_of
from mmspec.modality import Entry
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.training.fitting import Course, Fall, chunks
from mmspec.training.heads import EAGLE
from mmspec.training.reporting import Report
from mmspec.training.trainable import learn
from mmspec.zoo.prompts import prompts
from mmspec.zoo.training import kept, teacher
from tools.zoo.image import models
from tools.zoo.image.coding import crowded, learn_codes, learn_pictures
from tools.zoo.image.distil import begin_like, drawn_by, follow, head_lessons, watched
from tools.zoo.image.evaluate import facts_drawn, facts_kept, spread
from tools.zoo.image.training import (
    PromptEncoder,
    encoded_pool,
    learn_to_draw,
    learn_to_read,
    lessons,
)

ABOUT = f"""\
Draws the Scene world of the `mmspec` zoo in {models.PIXELS} x {models.PIXELS} pixels, \
{models.SIDE} x {models.SIDE} codes
out of {models.CODES}: one to three coloured shapes or written digits on pale tiles of a
board of nine places, and clouds, grass, bricks, water or sand in all others. Say, for
example, "a large red circle in the top left corner and a small blue star in the center".
The eye that the class asks for is untrained: it only draws.
"""
NOTES = f"""\
`facts` is the share of facts right (size, colour, name and place of each thing) that
`mmspec.zoo.reading` finds in pictures of held-out prompts; `facts of scenes` is that
of pictures of their scenes, coded and painted again; `entropy` is the mean of the guided
distributions of its own pictures' codes, in nats, and `commonest code` the share of the code drawn
most often; `acceptance length` is codes per round of coupled chain speculation with five
drafted codes. All are measured on the float16 weights, run in float32, at temperature 1
and guidance {models.GUIDANCE}.
"""
HELD_OUT = 128
BATCH = 32
HEAD_BATCH = 16
PICTURES = 4096  # that the picture part learns from


@dataclass(frozen=True)
class ImagePlan:
    """How a checkpoint is trained: steps of each stage, and how many scenes it sees."""

    shape: models.ImageShape | None  # None is a feature head, of the target's widths
    drawing: tuple[Fall, ...]  # one after the other; a drafter or a head needs one
    pool: int
    seeing: int = 0
    painting: int = 0
    reading: int = 0


PLANS = {
    "image": ImagePlan(
        models.TARGET,
        (Fall(1850, 1.5e-3), Fall(700, 1.5e-3), Fall(900, 1.5e-3), Fall(700, 1.2e-3)),
        pool=12288,
        seeing=1200,
        painting=1900,
        reading=500,
    ),
    "image-drafter": ImagePlan(models.DRAFTER, (Fall(1600, 2e-3),), 1536),
    "image-head": ImagePlan(None, (Fall(500, 2e-3),), 1536),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach a Janus to draw, or a drafter or a head to follow one."""
    plan, processor, course = PLANS[entry.name], models.processor(), Course(seed, steps, progress)
    pool = course.cut(plan.pool, BATCH)
    target = None if entry.target is None else teacher(entry.target)
    seen = None if target is None else drawn_by(target, processor, pool, course.later(1))
    model: Any = _untrained(plan, processor, target)

    def save() -> None:
        model.half().save_pretrained(folder)
        if plan.shape is not None:
            processor.save_pretrained(folder)

    with kept(save):
        if seen is None:
            _learn(plan, model, processor, pool, course)
        elif plan.shape is None:
            taught = head_lessons(target, processor, *seen, HEAD_BATCH, seed)
            fall = plan.drawing[0]
            count = course.cut(fall.steps)
            learn(EAGLE, reader_of(target), model, taught, count, fall.rate, progress, weight=0.5)
        else:
            begin_like(model, target)
            distributions, reader = (
                watched(target, processor, *seen),
                PromptEncoder(processor.tokenizer),
            )
            follow(model, reader, distributions, plan.drawing[0], course)
    return {
        "steps": sum(course.cut(fall.steps) for fall in plan.drawing),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _untrained(plan: ImagePlan, processor: Any, target: Any) -> Any:
    if plan.shape is not None:
        return models.janus(plan.shape, processor.tokenizer)
    text = target.config.get_text_config(decoder=True)
    return FeatureHead(FeatureHeadConfig.of(text, models.CODES))


def _learn(plan: ImagePlan, model: Any, processor: Any, pool: int, course: Course) -> None:
    """All that a target learns: to see, to paint with codes, to read, to draw."""
    reader, coder = PromptEncoder(processor.tokenizer), model.model.vqmodel
    shown = crowded(course.cut(PICTURES, BATCH), course)
    learn_pictures(coder, shown, plan.seeing, course)
    learn_codes(coder, shown, plan.painting, course)
    learn_to_read(model, reader, plan.reading, course)
    scenes, codes = encoded_pool(coder, pool, course)
    for turn, fall in enumerate(plan.drawing):
        taught = lessons(scenes, codes, reader, BATCH, course.seed + turn)
        learn_to_draw(model, taught, fall, course)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Facts right in pictures (a target), or codes per round at five drafted codes (a drafter)."""
    asked, model, processor = prompts(count, "held-out"), load(entry, folder), models.processor()
    if entry.target is None:
        right, total = facts_drawn(model, processor, asked)
        kept_, shown = facts_kept(model, [prompt.scene for prompt in asked])
        nats, share = spread(model, processor, [prompt.text for prompt in asked])
        return {
            "facts": round(right / total, 4),
            "facts_of_scenes": round(kept_ / shown, 4),
            "entropy": round(nats, 2),
            "commonest_code": round(share, 4),
        }
    target = teacher(entry.target)
    texts = [prompt.text for prompt in asked]
    return {"acceptance_length": acceptance(model, target, processor, texts)}


def acceptance(
    drafter: Any, target: Any, processor: Any, texts: Sequence[str], batch: int = 16
) -> float:
    """Codes per round of coupled chain speculation with five drafted codes, at temperature 1."""
    fast = accelerate(target, "coupled", drafter=drafter, processor=processor)
    how: dict[str, Any] = {"do_sample": True, "guidance": models.GUIDANCE, "seed": 0}
    lengths = []
    for part in chunks(texts, batch):
        made = fast.generate_images(prompt=list(part), **how)
        lengths += [made.stats.mean_acceptance_length] * len(part)
    return round(fmean(lengths), 2)
