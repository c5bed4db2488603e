"""Train the autoregressive image checkpoints of the zoo from a seed, on one CPU core."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.modalities.image.zoo import models
from mmspec.modalities.image.zoo.coding import learn_codes, learn_pictures
from mmspec.modalities.image.zoo.distil import begin_like, drawn_by, follow, head_lessons, watched
from mmspec.modalities.image.zoo.evaluate import acceptance, facts_drawn, facts_kept
from mmspec.modalities.image.zoo.loading import load
from mmspec.modalities.image.zoo.training import (
    Reader,
    encoded_pool,
    learn_to_draw,
    learn_to_read,
    lessons,
)
from mmspec.modality import Entry
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.training.heads import learn_head
from mmspec.zoo import catalogue
from mmspec.zoo.learning import Progress, silent
from mmspec.zoo.loading import load_folder
from mmspec.zoo.plans import cut, written
from mmspec.zoo.prompts import prompts
from mmspec.zoo.saving import card

BATCH = 32
HEAD_BATCH = 16
HELD_OUT = 128  # prompts that the report is measured on
PATCHED = 1024  # pictures that codes are found in


@dataclass(frozen=True)
class Plan:
    """How a checkpoint is trained: steps of each stage, and how many scenes it sees.

    Drawing may fall from a rate to a hundredth of it `again`: steps and rate of each further fall.
    """

    shape: models.ImageShape | None  # None is a feature head, of the target's widths
    drawing: int
    rate: float
    pool: int
    seeing: int = 0
    painting: int = 0
    reading: int = 0
    again: tuple[tuple[int, float], ...] = ()


PLANS = {
    "image": Plan(
        models.TARGET,
        drawing=1850,
        rate=1.5e-3,
        pool=16384,
        seeing=700,
        painting=800,
        reading=500,
        again=((900, 1.5e-3), (700, 1.2e-3)),
    ),
    "image-drafter": Plan(models.DRAFTER, 2000, 2e-3, 4096),
    "image-head": Plan(None, 800, 2e-3, 4096),
}


def train(
    name: str,
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a checkpoint, write it to `out` (its folder in the package by default) and measure it.

    Every stage is cut to `steps` if given. The drafters learn from the target in the package, so
    train that first. The report, also kept in the model card, is measured on what was written.
    """
    entry = catalogue.info(name)
    plan = PLANS[entry.name]
    folder = out or catalogue.path(entry.name)
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        processor = models.processor()
        if entry.target is None:
            model = _target(plan, processor, seed, steps, progress)
        else:
            target = load_folder(written(entry.target), sees=True)
            model = _drafter(plan, target, processor, seed, steps, progress)
        model.half().save_pretrained(folder)
        if plan.shape is not None:
            processor.save_pretrained(folder)
    minutes = (time.monotonic() - started) / 60
    report = {
        "name": entry.name,
        "seed": seed,
        "steps": sum(cut(fall, steps) for fall, _ in _falls(plan)),
        "minutes": round(minutes, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": (folder / "model.safetensors").stat().st_size,
        **_measure(entry, folder, processor, HELD_OUT if steps is None else 2),
    }
    _write_card(folder, entry, report)
    return report


def _target(plan: Plan, processor: Any, seed: int, steps: int | None, progress: Progress) -> Any:
    assert plan.shape is not None
    reader = Reader(processor.tokenizer)
    model: Any = models.janus(plan.shape, processor.tokenizer)
    coder = model.model.vqmodel
    learn_pictures(coder, cut(plan.seeing, steps), seed, progress=progress)
    patches = cut(PATCHED, steps and steps * BATCH)
    learn_codes(coder, cut(plan.painting, steps), seed, pool=patches, progress=progress)
    learn_to_read(model, reader, cut(plan.reading, steps), seed, progress=progress)
    pool = cut(plan.pool, steps and steps * BATCH)
    scenes, codes = encoded_pool(coder, pool, seed, progress=progress)
    for turn, (fall, rate) in enumerate(_falls(plan)):
        taught = lessons(scenes, codes, reader, BATCH, seed + turn)
        learn_to_draw(model, taught, cut(fall, steps), rate, progress)
    return model


def _falls(plan: Plan) -> list[tuple[int, float]]:
    return [(plan.drawing, plan.rate), *plan.again]


def _drafter(
    plan: Plan, target: Any, processor: Any, seed: int, steps: int | None, progress: Progress
) -> Any:
    pool = cut(plan.pool, steps and steps * BATCH)
    texts, codes = drawn_by(target, processor, pool, seed + 1, progress=progress)
    if plan.shape is None:
        return _head(plan, target, processor, texts, codes, seed, steps, progress)
    seen = watched(target, processor, texts, codes)
    reader = Reader(processor.tokenizer)
    model: Any = models.janus(plan.shape, processor.tokenizer)
    begin_like(model, target)
    follow(model, reader, seen, cut(plan.drawing, steps), plan.rate, seed, progress=progress)
    return model


def _head(
    plan: Plan,
    target: Any,
    processor: Any,
    texts: list[str],
    codes: Tensor,
    seed: int,
    steps: int | None,
    progress: Progress,
) -> FeatureHead:
    text = target.config.get_text_config(decoder=True)
    head = FeatureHead(FeatureHeadConfig.of(text, models.CODES))
    taught = head_lessons(target, processor, texts, codes, HEAD_BATCH, seed)
    learn_head(target, head, taught, cut(plan.drawing, steps), plan.rate, progress, weight=0.5)
    return head


def _measure(entry: Entry, folder: Path, processor: Any, n: int) -> dict[str, float]:
    """Facts right in pictures (a target), or codes per round at five drafted codes (a drafter)."""
    asked = prompts(n, "held-out")
    if entry.target is None:
        model = load_folder(folder, sees=True)
        right, total = facts_drawn(model, processor, asked)
        kept, shown = facts_kept(model, [prompt.scene for prompt in asked])
        return {"facts": round(right / total, 4), "facts_of_scenes": round(kept / shown, 4)}
    texts = [prompt.text for prompt in asked]
    drafter = load(entry, folder)
    return {
        "acceptance_length": acceptance(
            drafter, load_folder(written(entry.target), sees=True), processor, texts
        )
    }


def _write_card(folder: Path, entry: Entry, report: dict[str, Any]) -> None:
    """Say in README.md what the checkpoint is, how it was made and how good it is."""
    about = (
        f"Draws the Scene world of the `mmspec` zoo in {models.PIXELS} x {models.PIXELS} pixels, "
        f"{models.SIDE} x {models.SIDE} codes\n"
        f"out of {models.CODES}: one to three coloured shapes or written digits on a board of\n"
        'nine places. Say, for example, "a large red circle in the top left corner and a small\n'
        'blue star in the center". The eye that the class asks for is untrained: it only draws.'
    )
    notes = (
        "`facts` is the share of facts right (size, colour, name and place of each thing) that\n"
        "`mmspec.zoo.reading` finds in pictures of held-out prompts; `facts of scenes` is that\n"
        "of pictures of their scenes, coded and painted again; `acceptance length` is codes per\n"
        "round of coupled chain speculation with five drafted codes. All are measured on the\n"
        f"float16 weights, run in float32, at temperature 1 and guidance {models.GUIDANCE}.\n"
    )
    card(folder, entry, about, report, notes)
