"""Train the text-to-image checkpoints of the zoo from a seed, in minutes on one CPU core."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmspec.modalities.diffusion.checkpoints import load
from mmspec.modality import Entry
from mmspec.training.fitting import Course, Fall
from mmspec.training.reporting import Report
from mmspec.zoo.prompts import prompts, training_scenes
from mmspec.zoo.training import kept, teacher
from tools.zoo.diffusion import models
from tools.zoo.diffusion.evaluate import facts_drawn, overlap
from tools.zoo.diffusion.training import (
    encoded,
    learn_pictures,
    learn_to_draw,
    learn_words,
    lessons,
)

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

ABOUT = """\
Draws the Scene world of the `mmspec` zoo in 48 x 48 pixels: one to three coloured
shapes or written digits on a board of nine places. Say, for example, "a large red
circle in the top left corner and a small blue star in the center". The pipeline knows
no other size, so call it with `use_resolution_binning=False`.
"""
NOTES = f"""\
`facts` is the share of facts right (size, colour, name and place of each thing) that
`mmspec.zoo.reading` finds in pictures of held-out prompts, at {models.STEPS} steps and
guidance {models.GUIDANCE}; `acceptance` is the mass that the drafter's distribution of the next
state shares with the target's, averaged along the target's own way through the steps.
Both are measured on the float16 weights, run in float32.
"""
HELD_OUT = 64
BATCH = 64


@dataclass(frozen=True)
class DenoiserPlan:
    """How a checkpoint is trained: steps of each stage, and how many scenes it sees."""

    shape: models.DenoiserShape
    drawing: Fall
    pool: int
    painting: int = 0
    reading: int = 0


PLANS = {
    "diffusion": DenoiserPlan(models.TARGET, Fall(2400, 1.5e-3), 16384, painting=800, reading=600),
    "diffusion-drafter": DenoiserPlan(models.DRAFTER, Fall(1500, 1.5e-3), 8192),
}


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach all parts of a pipeline, or a denoiser to follow that of its target."""
    plan, course = PLANS[entry.name], Course(seed, steps, progress)
    followed: Any = None
    if entry.target is None:
        words, text, pictures = _begun(plan, course)
    else:
        target = teacher(entry.target)
        words, text, pictures = target.tokenizer, target.text_encoder, target.vae
        followed, course = target.transformer, course.later(1)
    batches = lessons(text, words, pictures, course.cut(plan.pool, BATCH), BATCH, course)
    denoiser: Any = models.denoiser(plan.shape)

    def save() -> None:
        denoiser.half()
        if followed is None:  # the words stay in float32: that part is loaded as it is stored
            models.pipeline(words, text, pictures.half(), denoiser).save_pretrained(folder)
        else:
            denoiser.save_pretrained(folder)

    with kept(save):
        learn_to_draw(denoiser, models.scheduler(), batches, plan.drawing, course, followed)
    return {"steps": course.cut(plan.drawing.steps)}


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Facts right in pictures (a target), or states of the target's chain kept (a drafter)."""
    asked, model = prompts(count, "held-out"), load(entry, folder)
    if entry.target is None:
        right, total = facts_drawn(model, asked)
        return {"facts": round(right / total, 4)}
    texts = [prompt.text for prompt in asked[:16]]
    return {"acceptance": overlap(model, teacher(entry.target), texts)}


def _begun(
    plan: DenoiserPlan, course: Course
) -> tuple[PreTrainedTokenizerFast, T5EncoderModel, Any]:
    """The words, the text encoder and the autoencoder, which learn before there is drawing."""
    words, pictures = models.tokenizer(), models.autoencoder()
    learn_pictures(pictures, plan.painting, course)
    pictures = _normalised(pictures, course.seed)
    text = models.text_encoder(len(words))
    learn_words(text, words, plan.reading, course)
    return words, text, pictures


def _normalised(pictures: AutoencoderTiny, seed: int) -> AutoencoderTiny:
    """The same autoencoder, told how to scale its latents to unit variance."""
    with torch.no_grad():
        spread = encoded(pictures, list(islice(training_scenes(seed), 256))).std()
    scaled = models.autoencoder(scaling=round(1 / float(spread), 4))
    scaled.load_state_dict(pictures.state_dict())
    return scaled
