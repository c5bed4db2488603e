"""Train the text-to-image checkpoints of the zoo from a seed, in minutes on one CPU core."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmspec.modalities.diffusion.zoo import models
from mmspec.modalities.diffusion.zoo.evaluate import facts_drawn, overlap
from mmspec.modalities.diffusion.zoo.loading import load_denoiser, load_pipeline
from mmspec.modalities.diffusion.zoo.training import (
    encoded,
    learn_pictures,
    learn_to_draw,
    learn_words,
    lessons,
)
from mmspec.modality import Entry
from mmspec.zoo import catalogue
from mmspec.zoo.learning import Progress, silent
from mmspec.zoo.plans import cut, written
from mmspec.zoo.prompts import prompts, training_scenes
from mmspec.zoo.saving import card

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, PixArtAlphaPipeline

BATCH = 64
HELD_OUT = 64  # prompts that the report is measured on


@dataclass(frozen=True)
class Plan:
    """How a checkpoint is trained: steps of each stage, and how many scenes it sees."""

    shape: models.DenoiserShape
    drawing: int
    rate: float
    pool: int
    painting: int = 0
    reading: int = 0


PLANS = {
    "diffusion": Plan(models.TARGET, 2400, 1.5e-3, 16384, painting=800, reading=600),
    "diffusion-drafter": Plan(models.DRAFTER, 1500, 1.5e-3, 8192),
}


def train(
    name: str,
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a checkpoint, write it to `out` (its folder in the package by default) and measure it.

    Every stage is cut to `steps` if given. The drafter learns from the target in the package, so
    train that first. The report, also kept in the model card, is measured on what was written.
    """
    entry = catalogue.info(name)
    plan = PLANS[entry.name]
    folder = out or catalogue.path(entry.name)
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if entry.target is None:
            model: Any = _target(plan, seed, steps, progress)
        else:
            model = _drafter(plan, load_pipeline(written(entry.target)), seed, steps, progress)
        model.save_pretrained(folder)
    minutes = (time.monotonic() - started) / 60
    weights = sorted(folder.rglob("*.safetensors"))
    report = {
        "name": entry.name,
        "seed": seed,
        "steps": cut(plan.drawing, steps),
        "minutes": round(minutes, 1),
        "bytes": sum(file.stat().st_size for file in weights),
        **_measure(entry, folder, HELD_OUT if steps is None else 2),
    }
    _write_card(folder, entry, report)
    return report


def _target(plan: Plan, seed: int, steps: int | None, progress: Progress) -> PixArtAlphaPipeline:
    words = models.tokenizer()
    pictures = models.autoencoder()
    learn_pictures(pictures, cut(plan.painting, steps), seed, progress=progress)
    pictures = _normalised(pictures, seed)
    text = models.text_encoder(len(words))
    learn_words(text, words, cut(plan.reading, steps), seed, progress=progress)
    pool = cut(plan.pool, steps and steps * BATCH)
    batches = lessons(text, words, pictures, pool, BATCH, seed, progress)
    transformer = models.denoiser(plan.shape)
    learn_to_draw(
        transformer, models.scheduler(), batches, cut(plan.drawing, steps), plan.rate, progress
    )
    # The words stay in float32: a pipeline loaded without a dtype leaves that part as it is stored.
    return models.pipeline(words, text, pictures.half(), transformer.half())


def _drafter(
    plan: Plan, target: PixArtAlphaPipeline, seed: int, steps: int | None, progress: Progress
) -> Any:
    parts: Any = target
    pool = cut(plan.pool, steps and steps * BATCH)
    batches = lessons(
        parts.text_encoder, parts.tokenizer, parts.vae, pool, BATCH, seed + 1, progress
    )
    transformer = models.denoiser(plan.shape)
    learn_to_draw(
        transformer,
        models.scheduler(),
        batches,
        cut(plan.drawing, steps),
        plan.rate,
        progress,
        teacher=parts.transformer,
    )
    return transformer.half()


def _normalised(pictures: AutoencoderTiny, seed: int) -> AutoencoderTiny:
    """The same autoencoder, told how to scale its latents to unit variance."""
    source = training_scenes(seed)
    with torch.no_grad():
        spread = encoded(pictures, [next(source) for _ in range(256)]).std()
    scaled = models.autoencoder(scaling=round(1 / float(spread), 4))
    scaled.load_state_dict(pictures.state_dict())
    return scaled


def _measure(entry: Entry, folder: Path, n: int) -> dict[str, float]:
    """Facts right in pictures (a target), or states of the target's chain kept (a drafter)."""
    asked = prompts(n, "held-out")
    if entry.target is None:
        right, total = facts_drawn(load_pipeline(folder), asked)
        return {"facts": round(right / total, 4)}
    texts = [prompt.text for prompt in asked[:16]]
    return {
        "acceptance": overlap(load_denoiser(folder), load_pipeline(written(entry.target)), texts)
    }


def _write_card(folder: Path, entry: Entry, report: dict[str, Any]) -> None:
    """Say in README.md what the checkpoint is, how it was made and how good it is."""
    about = (
        "Draws the Scene world of the `mmspec` zoo in 48 x 48 pixels: one to three coloured\n"
        'shapes or written digits on a board of nine places. Say, for example, "a large red\n'
        'circle in the top left corner and a small blue star in the center". The pipeline knows\n'
        "no other size, so call it with `use_resolution_binning=False`."
    )
    notes = (
        f"`facts` is the share of facts right (size, colour, name and place of each thing) that\n"
        f"`mmspec.zoo.reading` finds in pictures of held-out prompts, at {models.STEPS} steps and\n"
        f"guidance {models.GUIDANCE}; `acceptance` is the mass that the drafter's law of the next\n"
        "state shares with the target's, averaged along the target's own way through the steps.\n"
        "Both are measured on the float16 weights, run in float32.\n"
    )
    card(folder, entry, about, report, notes)
