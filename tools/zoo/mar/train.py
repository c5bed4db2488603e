"""Train the zoo's images of continuous tokens from a seed, in minutes on one CPU core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

from mmspec.api import accelerate
from mmspec.modalities.mar.checkpoints import load
from mmspec.modalities.mar.held_out import LABELS, classes
from mmspec.modality import Entry
from mmspec.models.mar import MarForImageGeneration
from mmspec.training.fitting import Course, Fall, chunks
from mmspec.training.reporting import Report
from mmspec.zoo.loading import load_vae
from mmspec.zoo.training import kept, teacher, written
from tools.zoo.mar import models
from tools.zoo.mar.distil import begin_like, follow
from tools.zoo.mar.evaluate import PLAN, facts_drawn
from tools.zoo.mar.training import encoded_pool, learn_to_draw, lessons

DRAFTED, TOGETHER = 1, 16  # steps; pictures, where acceptance is measured
ABOUT = f"""\
Draws one large thing of the Scene world of the `mmspec` zoo in 48 x 48 pixels, behind a
class such as "red circle" ({len(LABELS)} of them, see `label2id` in
`config.json`); where the thing goes is up to the model. Tokens are 6 x 6 patches of 16
latents. The head predicts velocity, not noise as the published models do. The folder
`vae` of the target, the autoencoder of `diffusion`, makes pixels: `zoo.vae("mar")`.
"""
NOTES = f"""\
`facts` is the share of pictures in which `mmspec.zoo.reading` finds the thing asked for
and nothing else; `acceptance length` is steps per round of the recipe `cspd-coupled`
with {DRAFTED} drafted step. Both are measured on the float16 weights, run in float32,
in {models.STEPS} steps at guidance {models.GUIDANCE}, {models.HEAD_STEPS} steps of the
head and `last_noise=True`.
"""
HELD_OUT = 224
PICTURES_FROM = "diffusion"  # whose autoencoder is taken over


@dataclass(frozen=True)
class MarPlan:
    """How a checkpoint is trained, in falls of the rate, and on how many pictures."""

    shape: models.MarShape
    drawing: tuple[Fall, ...]
    pool: int
    batch: int


PLANS = {
    "mar": MarPlan(models.TARGET, (Fall(1200, 1.5e-3), Fall(700, 1.2e-3)), 12096, 32),
    "mar-drafter": MarPlan(
        models.DRAFTER, (Fall(700, 1.5e-3), Fall(900, 1.5e-3), Fall(450, 1e-3)), 12096, 24
    ),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach a target to draw, or a drafter to follow it.

    The target draws with the autoencoder of the zoo's diffusion pipeline and keeps a copy.
    """
    plan, source = PLANS[entry.name], written(entry.target or PICTURES_FROM)
    target = None if entry.target is None else teacher(entry.target)
    course = Course(seed, steps, progress)
    pictures = course.cut(plan.pool, plan.batch)
    scale = None if target is None else target.config.latent_scale
    pool, scale = encoded_pool(load_vae(source), pictures, course, scale)
    taught = lessons(pool, plan.batch, seed)
    model: Any = models.mar(plan.shape, scale)

    def save() -> None:
        model.half().save_pretrained(folder)
        if target is None:
            copytree(source / "vae", folder / "vae")

    with kept(save):
        if target is not None:
            begin_like(model, target)
        for fall in plan.drawing:
            if target is None:
                learn_to_draw(model, taught, fall, course)
            else:
                follow(model, target, taught, PLAN, fall, course)
    return {
        "steps": sum(course.cut(fall.steps) for fall in plan.drawing),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Pictures that are right (a target), or steps per round with one drafted (a drafter)."""
    model, asked = load(entry, folder), classes(count, seed=1)
    if entry.target is None:
        right, total = facts_drawn(model, load_vae(folder), asked, seed=1)
        return {"facts": round(right / total, 4)}
    return {"acceptance_length": acceptance(model, teacher(entry.target), asked[:16])}


def acceptance(
    drafter: MarForImageGeneration, target: MarForImageGeneration, asked: Sequence[int]
) -> float:
    """Steps per round of `cspd-coupled` with one drafted step."""
    fast: Any = accelerate(target, "cspd-coupled", drafter=drafter, length=DRAFTED)
    made = [
        fast.generate_images(
            class_labels=list(part),
            steps=models.STEPS,
            guidance=models.GUIDANCE,
            head_steps=models.HEAD_STEPS,
            last_noise=True,
            seed=turn * TOGETHER,
        ).stats
        for turn, part in enumerate(chunks(asked, TOGETHER))
    ]
    rounds = sum(sum(stats.acceptance_histogram) for stats in made)
    steps = sum(stats.num_new_tokens for stats in made)
    return round(float(steps / rounds), 2)
