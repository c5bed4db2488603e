"""Train `image-sketch`: a small Janus of small pictures, and a resampler to those of the target.

The language model learns from scenes, as the target's does. The resampler learns what the target's
picture part codes things as, then the target's laws of such codes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.api import accelerate
from mmspec.modalities.image.families import image_family
from mmspec.modalities.image.zoo import models
from mmspec.modalities.image.zoo.evaluate import drawn_codes
from mmspec.modalities.image.zoo.low_resolution_coding import SKETCH, kinds, learn_kinds, parts_of
from mmspec.modalities.image.zoo.low_resolution_resampling import (
    coded_scenes,
    drawn_scenes,
    learn_to_enlarge,
    untrained,
)
from mmspec.modalities.image.zoo.training import (
    Lesson,
    Reader,
    busy_scenes,
    divided,
    lessons,
    states_of,
)
from mmspec.models.code_resampler import FOLDER
from mmspec.zoo import catalogue
from mmspec.zoo.batches import BOARD_CLASSES
from mmspec.zoo.fitting import fit
from mmspec.zoo.learning import Progress, silent
from mmspec.zoo.loading import load_folder
from mmspec.zoo.plans import cut, written
from mmspec.zoo.prompts import MOST, prompts
from mmspec.zoo.saving import card

NAME, TARGET = "image-sketch", "image"
SHAPE = models.ImageShape(layers=3, width=96, inner=192, heads=3)
BATCH = 64
_FEW = 8  # pictures that a short trial learns enlarging from, for every step
HELD_OUT = 64  # prompts that the report is measured on


@dataclass(frozen=True)
class Plan:
    """Steps of each stage, and how many scenes each sees."""

    seeing: int = 700
    drawing: int = 2000
    pool: int = 16384
    enlarging: int = 600
    coded: int = 4096
    following: int = 800
    watched: int = 1536


def train(
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """Train it, write it to `out` (its folder in the package by default) and measure it.

    Every stage is cut to `steps` if given. Raises ValueError where there is no target yet.
    """
    plan, folder, started = plan or Plan(), out or catalogue.path(NAME), time.monotonic()
    target, words = load_folder(written(TARGET), sees=True), models.processor()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        processor = models.processor(SKETCH)
        model: Any = models.janus(SHAPE, processor.tokenizer, SKETCH)
        learn_kinds(model.model.vqmodel, cut(plan.seeing, steps), seed, progress=progress)
        scenes = list(islice(busy_scenes(seed, MOST), cut(plan.pool, steps and steps * BATCH)))
        taught = lessons(scenes, kinds(scenes), Reader(processor.tokenizer), BATCH, seed)
        learn_to_sketch(model, taught, cut(plan.drawing, steps), 2e-3, progress)
        resampler = untrained(image_family(target).codebook, image_family(model).codebook)
        coder, few = target.model.vqmodel, steps and steps * _FEW
        seen = coded_scenes(coder, cut(plan.coded, few), seed, progress)
        learn_to_enlarge(resampler, seen, cut(plan.enlarging, steps), 3e-3, seed, progress)
        seen = drawn_scenes(resampler, target, words, cut(plan.watched, few), seed + 1, progress)
        learn_to_enlarge(resampler, seen, cut(plan.following, steps), 2e-3, seed, progress)
        model.half().save_pretrained(folder)
        processor.save_pretrained(folder)
        half: Any = resampler.half
        half().save_pretrained(folder / FOLDER)
    minutes = (time.monotonic() - started) / 60
    report = {
        "name": NAME,
        "seed": seed,
        "steps": cut(plan.drawing, steps),
        "minutes": round(minutes, 1),
        "parameters": sum(p.numel() for part in (model, resampler) for p in part.parameters()),
        "bytes": sum(file.stat().st_size for file in folder.rglob("*.safetensors")),
        **measure(folder, target, words, HELD_OUT if steps is None else 2),
    }
    _write_card(folder, report)
    return report


def learn_to_sketch(
    model: Any,
    taught: Iterator[Lesson],
    steps: int,
    rate: float,
    progress: Progress = silent,
) -> None:
    """Train the language model on codes, and on the name, colour and size that each stands for.

    The parts are what a prompt says, and are found in it long before their combinations.
    """
    heads = nn.Linear(model.config.text_config.hidden_size, sum(BOARD_CLASSES))

    def loss_of(lesson: Lesson) -> Tensor:
        states = states_of(model, lesson.prompts, lesson.codes)
        logits = model.model.generation_head(states).flatten(0, 1)
        said = heads(states).split(BOARD_CLASSES, -1)
        wanted = parts_of(lesson.codes).unbind(-1)
        losses = [
            functional.cross_entropy(p.flatten(0, 1), t.flatten())
            for p, t in zip(said, wanted, strict=True)
        ]
        return functional.cross_entropy(logits, lesson.codes.flatten()) + torch.stack(losses).sum()

    matrices, others = divided(model)
    others = [*others, *heads.parameters()]
    fit(others, taught, loss_of, steps, rate, "draw", progress, matrices)


def measure(folder: Path, target: Any, processor: Any, n: int) -> dict[str, float]:
    """Codes right in small pictures, and codes per target call of exact and of lossy drafting."""
    asked = prompts(n, "held-out")
    small: Any = load_folder(folder, sees=True)
    drawn = drawn_codes(small, models.processor(SKETCH), [one.text for one in asked])
    wanted = kinds([one.scene for one in asked])
    sides = {"things": wanted > 0, "blanks": wanted == 0}
    report = {
        name: round(float((drawn == wanted)[side].float().mean()), 4)
        for name, side in sides.items()
    }
    for verifier in ("coupled", None):
        fast = accelerate(target, "mulo-sd", drafter=small, processor=processor, verifier=verifier)
        calls = []
        for number, one in enumerate(asked):
            made = fast.generate_images(
                prompt=one.text, temperature=1.0, guidance=models.GUIDANCE, seed=number
            )
            calls.append(made.stats.target_calls)
        name = "codes_per_call" if verifier is None else "codes_per_call_exact"
        report[name] = round(models.SIDE**2 / fmean(calls), 2)
    return report


def _write_card(folder: Path, report: dict[str, Any]) -> None:
    """Say in README.md what the checkpoint is, how it was made and how good it is."""
    about = (
        f"Draws the Scene world of the `mmspec` zoo in {SKETCH.pixels} x {SKETCH.pixels} pixels, "
        f"{SKETCH.side} x {SKETCH.side} codes out of\n{SKETCH.codes}: one for every name, colour "
        "and size of a thing, and one for blank paper. Drafts for\n"
        "`image` under the recipe `mulo-sd`. The resampler between the codes of both lies in the\n"
        f"folder `{FOLDER}`."
    )
    notes = (
        "`things` and `blanks` are the shares of codes right in small pictures of held-out\n"
        "prompts, where these say that there is something and where there is nothing. `codes per\n"
        "call` are codes of the target's pictures over its calls with `mulo-sd` as it is, which\n"
        'is lossy, and `exact` with `verifier="coupled"`. All are measured on the float16\n'
        f"weights, run in float32, at temperature 1 and guidance {models.GUIDANCE}.\n"
    )
    card(folder, catalogue.info(NAME), about, report, notes)
