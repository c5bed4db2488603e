"""Train the bundled MAR checkpoints from a seed, in minutes on one CPU core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

from mmspec.api import accelerate
from mmspec.modalities.mar.checkpoints import LABELS, classes, load
from mmspec.modality import Entry
from mmspec.models.mar import MarForImageGeneration
from mmspec.training.fitting import CosineDecay, iterate_chunks
from mmspec.zoo.catalogue import load_vae
from mmspec.zoo.training import load_teacher, require_checkpoint
from tools.zoo.mar import models
from tools.zoo.mar.distil import distil_drafter, init_from_target
from tools.zoo.mar.evaluate import PLAN, score_generated_images
from tools.zoo.mar.training import MaskedExample, encode_pool, example_batches, train_generation
from tools.zoo.trainer import CheckpointTrainer, Setup

DRAFT_STEPS, BATCH = 1, 16  # in the measurement of acceptance
VAE_SOURCE = "diffusion"  # checkpoint whose autoencoder is used


@dataclass(frozen=True)
class MarPlan:
    """Stages, number of images and batch size."""

    shape: models.MarShape
    generation: tuple[CosineDecay, ...]
    pool: int
    batch: int


@dataclass(frozen=True)
class MarParts:
    """The model, its training examples, and the folder of the autoencoder."""

    model: Any
    examples: Iterator[MaskedExample]
    source: Path


def build_parts(setup: Setup[MarPlan]) -> MarParts:
    """Encode images with the autoencoder of the diffusion pipeline, and initialise the model."""
    plan, run, target = setup.plan, setup.run, setup.target
    source = require_checkpoint(setup.entry.target or VAE_SOURCE)
    scale = None if target is None else target.config.latent_scale
    count = run.limit_steps(plan.pool, plan.batch)
    pool, scale = encode_pool(load_vae(source), count, run, scale)
    examples = example_batches(pool, plan.batch, run.seed)
    return MarParts(models.mar(plan.shape, scale), examples, source)


def fit_parts(setup: Setup[MarPlan], parts: MarParts) -> None:
    """Train a target on images, or distil a drafter from one."""
    plan, run, target, model = setup.plan, setup.run, setup.target, parts.model
    if target is not None:
        init_from_target(model, target)
    for decay in plan.generation:
        if target is None:
            train_generation(model, parts.examples, decay, run)
        else:
            distil_drafter(model, target, parts.examples, PLAN, decay, run)


def save_parts(setup: Setup[MarPlan], parts: MarParts, folder: Path) -> None:
    """Write the model in float16; a target with a copy of the autoencoder."""
    parts.model.half().save_pretrained(folder)
    if setup.target is None:
        copytree(parts.source / "vae", folder / "vae")


def evaluate(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Correct images (a target), or steps per round with one drafted step (a drafter)."""
    model, labels = load(entry, folder), classes(count, seed=1)
    if entry.target is None:
        right, total = score_generated_images(model, load_vae(folder), labels, seed=1)
        return {"facts": round(right / total, 4)}
    return {"acceptance_length": acceptance(model, load_teacher(entry.target), labels[:16])}


def acceptance(
    drafter: MarForImageGeneration, target: MarForImageGeneration, labels: Sequence[int]
) -> float:
    """Steps per round of `cspd-coupled` with one drafted step."""
    fast: Any = accelerate(target, "cspd-coupled", drafter=drafter, length=DRAFT_STEPS)
    runs = [
        fast.generate_images(
            class_labels=list(part),
            steps=models.STEPS,
            guidance=models.GUIDANCE,
            head_steps=models.HEAD_STEPS,
            last_noise=True,
            seed=number * BATCH,
        ).stats
        for number, part in enumerate(iterate_chunks(labels, BATCH))
    ]
    rounds = sum(sum(stats.acceptance_histogram) for stats in runs)
    steps = sum(stats.num_new_tokens for stats in runs)
    return round(float(steps / rounds), 2)


TRAINER = CheckpointTrainer(
    about=f"""\
Generates one large thing of the Scene world of the `mmspec` zoo in 48 x 48 pixels, conditioned
on a class such as "red circle" ({len(LABELS)} of them, see `label2id` in `config.json`); the
position is up to the model. Tokens are 6 x 6 patches of 16 latents. The head predicts
velocity, not noise as in the published models. The folder `vae` of the target is the
autoencoder of `diffusion`: `zoo.vae("mar")`.

The target is trained on scenes, with the autoencoder of `diffusion` fixed. The drafter begins with
weights of the target and is trained on the divergence of whole denoising paths under its sampler.
""",
    notes=f"""\
`facts` is the share of images in which `mmspec.zoo.scene_parser` finds the thing of the class
and nothing else; `acceptance length` is steps per round of the recipe `cspd-coupled`
with {DRAFT_STEPS} drafted step. Both are measured on the float16 weights, run in float32,
in {models.STEPS} steps at guidance {models.GUIDANCE}, {models.HEAD_STEPS} steps of the
head and `last_noise=True`.
""",
    held_out=224,
    plans={
        "mar": MarPlan(
            models.TARGET, (CosineDecay(1200, 1.5e-3), CosineDecay(700, 1.2e-3)), 12096, 32
        ),
        "mar-drafter": MarPlan(
            models.DRAFTER,
            (CosineDecay(700, 1.5e-3), CosineDecay(900, 1.5e-3), CosineDecay(450, 1e-3)),
            12096,
            24,
        ),
    },
    build=build_parts,
    fit=fit_parts,
    save=save_parts,
    evaluate=evaluate,
    decays=lambda plan: plan.generation,
    modules=lambda parts: [parts.model],
)
ABOUT, NOTES, HELD_OUT, PLANS = TRAINER.about, TRAINER.notes, TRAINER.held_out, TRAINER.plans
train, measure = TRAINER.train, TRAINER.measure
