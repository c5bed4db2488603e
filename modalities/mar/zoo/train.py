"""Train the zoo's images of continuous tokens from a seed, in minutes on one CPU core."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

import torch

from mmspec.modalities.mar.zoo import distil as mar_distil
from mmspec.modalities.mar.zoo import models
from mmspec.modalities.mar.zoo import training as mar_training
from mmspec.modalities.mar.zoo.evaluate import DRAFTED, PLAN, acceptance, classes, facts_drawn
from mmspec.modalities.mar.zoo.loading import load_mar
from mmspec.modality import Entry
from mmspec.models.mar import MarForImageGeneration
from mmspec.zoo import catalogue
from mmspec.zoo.learning import Progress, silent
from mmspec.zoo.loading import load_vae
from mmspec.zoo.plans import cut, written
from mmspec.zoo.saving import card

HELD_OUT = 224  # pictures that the report is measured on
PICTURES_FROM = "diffusion"  # whose autoencoder is taken over


@dataclass(frozen=True)
class Plan:
    """How a checkpoint is trained, and on how many pictures.

    Drawing is steps and rate of one or more falls of the rate, one after the other.
    """

    shape: models.MarShape
    drawing: tuple[tuple[int, float], ...]
    pool: int
    batch: int


PLANS = {
    "mar": Plan(models.TARGET, ((1200, 1.5e-3), (700, 1.2e-3)), 12096, 32),
    "mar-drafter": Plan(models.DRAFTER, ((700, 1.5e-3), (900, 1.5e-3), (450, 1e-3)), 12096, 24),
}


def train(
    name: str,
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a checkpoint, write it to `out` (its folder in the package by default) and measure it.

    Everything is cut to `steps` if given. The target draws with the autoencoder of the zoo's
    diffusion pipeline and keeps a copy; the drafter learns from the target in the package. Train
    those first. The report, also kept in the model card, is measured on what was written.
    """
    entry = catalogue.info(name)
    plan = PLANS[entry.name]
    folder = out or catalogue.path(entry.name)
    source = written(entry.target or PICTURES_FROM)
    vae = load_vae(source)
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pictures = cut(plan.pool, steps and steps * plan.batch)
        target = None if entry.target is None else load_mar(written(entry.target))
        scale = None if target is None else target.config.latent_scale
        pool, scale = mar_training.encoded_pool(vae, pictures, seed, scale, progress=progress)
        taught = mar_training.lessons(pool, plan.batch, seed)
        model = models.mar(plan.shape, scale)
        if target is not None:
            mar_distil.begin_like(model, target)
        for planned, rate in plan.drawing:
            count = cut(planned, steps)
            if target is None:
                mar_training.learn_to_draw(model, taught, count, rate, progress)
            else:
                mar_distil.follow(model, target, taught, PLAN, count, rate, progress)
        _save(model, folder)
        if entry.target is None:
            copytree(source / "vae", folder / "vae", dirs_exist_ok=True)
    minutes = (time.monotonic() - started) / 60
    report = {
        "name": entry.name,
        "seed": seed,
        "steps": sum(cut(planned, steps) for planned, _ in plan.drawing),
        "minutes": round(minutes, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": (folder / "model.safetensors").stat().st_size,
        **_measure(entry, folder, HELD_OUT if steps is None else 2),
    }
    _write_card(folder, entry, report)
    return report


def _save(model: MarForImageGeneration, folder: Path) -> None:
    cast: Any = model.half
    cast().save_pretrained(folder)


def _measure(entry: Entry, folder: Path, n: int) -> dict[str, float]:
    """Pictures that are right (a target), or steps per round with one drafted (a drafter)."""
    model, asked = load_mar(folder), classes(n, seed=1)
    if entry.target is None:
        right, total = facts_drawn(model, load_vae(folder), asked, seed=1)
        return {"facts": round(right / total, 4)}
    return {"acceptance_length": acceptance(model, load_mar(written(entry.target)), asked[:16])}


def _write_card(folder: Path, entry: Entry, report: dict[str, Any]) -> None:
    """Say in README.md what the checkpoint is, how it was made and how good it is."""
    about = (
        "Draws one large thing of the Scene world of the `mmspec` zoo in 48 x 48 pixels, behind a\n"
        f'class such as "red circle" ({len(models.LABELS)} of them, see `label2id` in\n'
        "`config.json`); where the thing goes is up to the model. Tokens are 6 x 6 patches of 16\n"
        "latents. The head predicts velocity, not noise as the published models do. The folder\n"
        '`vae` of the target, the autoencoder of `diffusion`, makes pixels: `zoo.vae("mar")`.'
    )
    notes = (
        "`facts` is the share of pictures in which `mmspec.zoo.reading` finds the thing asked for\n"
        "and nothing else; `acceptance length` is steps per round of the recipe `cspd-coupled`\n"
        f"with {DRAFTED} drafted step. Both are measured on the float16 weights, run in float32,\n"
        f"in {models.STEPS} steps at guidance {models.GUIDANCE}, {models.HEAD_STEPS} steps of the\n"
        "head and `last_noise=True`.\n"
    )
    card(folder, entry, about, report, notes)
