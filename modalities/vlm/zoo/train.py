"""Train a checkpoint of the zoo from a seed, in minutes on two CPU cores."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmspec.modalities.diffusion.zoo import train as diffusion_train
from mmspec.modalities.image.zoo import low_resolution as image_sketch
from mmspec.modalities.image.zoo import train as image_train
from mmspec.modalities.mar.zoo import train as mar_train
from mmspec.modalities.vlm.zoo.architecture import (
    LLAVA_BLIND,
    LLAVA_SIGHTED,
    LLAVA_TARGET,
    QWEN_BLIND,
    QWEN_SIGHTED,
    QWEN_TARGET,
    Shape,
)
from mmspec.modalities.vlm.zoo.distil import lessons, said_by
from mmspec.modalities.vlm.zoo.evaluate import acceptance, facts_right
from mmspec.modalities.vlm.zoo.families import FAMILIES, Family
from mmspec.modalities.vlm.zoo.transfer import speak_like
from mmspec.modality import Entry
from mmspec.zoo import catalogue
from mmspec.zoo.batches import Batch, Encoder, fresh
from mmspec.zoo.language import Kind, examples
from mmspec.zoo.learning import (
    Progress,
    learn_to_see,
    learn_to_see_like,
    learn_to_talk,
    silent,
)
from mmspec.zoo.loading import load_folder
from mmspec.zoo.plans import cut, written
from mmspec.zoo.saving import save, write_card

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

BATCH = 32
HELD_OUT = 128  # examples that the report is measured on


@dataclass(frozen=True)
class Plan:
    """How a checkpoint is trained: `seeing` steps on pictures alone, then `talking`.

    Talking is steps and rate of one or more falls of the rate, one after the other. A deep narrow
    model needs several: each time the rate rises again, what was hard to look up is learnt further.
    """

    family: str
    shape: Shape
    seeing: int
    talking: tuple[tuple[int, float], ...]
    pool: int = 0  # answers of the target that a drafter learns from
    start: str | None = None  # whose text layers to begin with


PLANS = {
    "llava": Plan(
        "llava", LLAVA_TARGET, 600, ((2600, 1.5e-3), (1600, 1e-3), (900, 8e-4), (1200, 9e-4))
    ),
    "llava-drafter": Plan("llava", LLAVA_SIGHTED, 300, ((1500, 2e-3),), pool=4096),
    "llava-text-drafter": Plan("llava", LLAVA_BLIND, 0, ((1500, 2e-3),), pool=4096),
    "qwen2.5-vl": Plan(
        "qwen2.5-vl", QWEN_TARGET, 400, ((800, 1e-3), (450, 7e-4), (1000, 9e-4)), start="llava"
    ),
    "qwen2.5-vl-drafter": Plan(
        "qwen2.5-vl", QWEN_SIGHTED, 400, ((800, 1.5e-3),), pool=2048, start="llava-drafter"
    ),
    "qwen2.5-vl-text-drafter": Plan(
        "qwen2.5-vl", QWEN_BLIND, 0, ((400, 1e-3),), pool=2048, start="llava-text-drafter"
    ),
}


def train(
    name: str,
    out: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Train a checkpoint, write it to `out` (its folder in the package by default) and measure it.

    Every stage is cut to `steps` if given. A drafter learns from the target in the package, and
    some checkpoints start from another one there, so train those first. The report, also kept in
    the model card, is measured on what was written.
    """
    entry = catalogue.info(name)
    if catalogue.modality(name).name == "diffusion":
        return diffusion_train.train(name, out, steps, seed, progress)
    if entry.name in mar_train.PLANS:
        return mar_train.train(name, out, steps, seed, progress)
    if entry.name == image_sketch.NAME:
        return image_sketch.train(out, steps, seed, progress)
    if catalogue.modality(name).name == "image":
        return image_train.train(name, out, steps, seed, progress)
    plan = PLANS[entry.name]
    folder = out or catalogue.path(entry.name)
    started = time.monotonic()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        family = FAMILIES[plan.family]
        processor = family.build_processor()
        encoder = Encoder(family, processor)
        model = family.build(plan.shape, processor.tokenizer).train()
        seeing = cut(plan.seeing, steps)
        if plan.start is not None:
            _begin_like(plan.start, model, family, processor.tokenizer, seeing, seed, progress)
        elif seeing:
            learn_to_see(model, family, seeing, seed, progress=progress)
        if entry.target is None:
            batches: Iterator[Batch] = (encoder(samples) for samples in fresh(BATCH, seed))
        else:
            target = load_folder(written(entry.target), sees=True)
            pool = cut(plan.pool, steps and steps * BATCH)
            said = said_by(target, family, encoder, pool, seed, progress=progress)
            batches = lessons(said, encoder, BATCH, seed, blind=entry.sees == "nothing")
        for talking, rate in plan.talking:
            learn_to_talk(model, family, batches, cut(talking, steps), rate, progress)
        save(model, processor, folder, sees=entry.sees == "pixels")
    minutes = (time.monotonic() - started) / 60
    report = {
        "name": entry.name,
        "seed": seed,
        "steps": sum(cut(talking, steps) for talking, _ in plan.talking),
        "minutes": round(minutes, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": (folder / "model.safetensors").stat().st_size,
        **measure(entry, family, processor, folder, HELD_OUT if steps is None else BATCH),
    }
    write_card(folder, entry, report)
    return report


def measure(entry: Entry, family: Family, processor: Any, folder: Path, n: int) -> dict[str, float]:
    """Facts right (a target), or tokens per round at five drafted tokens (a drafter)."""
    model = load_folder(folder, entry.sees == "pixels")
    if entry.target is not None:
        encoder = Encoder(family, processor)
        return {
            "acceptance_length": acceptance(
                model, load_folder(written(entry.target), sees=True), family, encoder, n
            )
        }
    kinds: dict[str, Kind | None] = {
        "facts": None,
        "facts_in_captions": "caption",
        "facts_in_answers": "question",
    }
    report = {}
    for name, kind in kinds.items():
        right, asked = facts_right(model, processor, examples(n, "held-out", kind=kind))
        report[name] = round(right / max(asked, 1), 4)
    return report


def _begin_like(
    name: str,
    model: PreTrainedModel,
    family: Family,
    tokenizer: PreTrainedTokenizerFast,
    seeing: int,
    seed: int,
    progress: Progress,
) -> None:
    """Begin with the language of a checkpoint of another family, and learn to see what it sees."""
    sees = catalogue.info(name).sees == "pixels"
    other, other_family = load_folder(written(name), sees), FAMILIES[PLANS[name].family]
    speak_like(model, tokenizer, other, other_family.build_processor().tokenizer)
    if sees:
        learn_to_see_like(model, family, other, other_family, seeing, seed, progress=progress)
