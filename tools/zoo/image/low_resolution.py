"""Train `image-sketch`: a small Janus of low-resolution images, and a resampler to the target's.

The language model is trained on scenes, as the target's is. The resampler is trained on codes of
the target's autoencoder, then on the target's distributions of such codes.
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
from mmspec.training.fitting import CosineDecay, TrainingRun, fit
from mmspec.zoo.prompts import MAX_THINGS, prompts
from mmspec.zoo.scene_tensors import BOARD_CLASSES, board_loss
from mmspec.zoo.training import load_teacher
from tools.zoo.image import models
from tools.zoo.image.evaluate import generate_codes
from tools.zoo.image.low_resolution_coding import (
    SMALL,
    encode_kinds,
    kind_attributes,
    train_kind_codebook,
)
from tools.zoo.image.low_resolution_resampling import (
    build_resampler,
    encode_scene_pairs,
    generate_scene_pairs,
    train_resampler,
)
from tools.zoo.image.training import (
    CodeExample,
    PromptEncoder,
    example_batches,
    generation_parameters,
    sample_training_scenes,
    states_of,
)
from tools.zoo.trainer import CheckpointTrainer, Setup

SHAPE = models.ImageShape(layers=3, width=96, inner=192, heads=3)
BATCH = 64
_PER_STEP = 8  # images for the resampler per step of a short trial


@dataclass(frozen=True)
class LowResolutionPlan:
    """Steps of each stage, and the number of scenes."""

    codebook: int = 700
    generation: CosineDecay = CosineDecay(2000, 2e-3)  # noqa: RUF009
    pool: int = 16384
    upsampling: CosineDecay = CosineDecay(600, 3e-3)  # noqa: RUF009
    encoded: int = 4096
    distillation: CosineDecay = CosineDecay(800, 2e-3)  # noqa: RUF009
    generated: int = 1536


@dataclass(frozen=True)
class LowResolutionParts:
    """The small model with its processor, and the resampler."""

    model: Any
    processor: Any
    resampler: Any


def build_parts(setup: Setup[LowResolutionPlan]) -> LowResolutionParts:
    """Train the small model, and initialise the resampler."""
    plan, run, processor = setup.plan, setup.run, models.processor(SMALL)
    model: Any = models.janus(SHAPE, processor.tokenizer, SMALL)
    train_kind_codebook(model.model.vqmodel, plan.codebook, run)
    count = run.limit_steps(plan.pool, BATCH)
    scenes = list(islice(sample_training_scenes(run.seed, MAX_THINGS), count))
    encoder = PromptEncoder(processor.tokenizer)
    examples = example_batches(scenes, encode_kinds(scenes), encoder, BATCH, run.seed)
    train_generation_of_kinds(model, examples, plan.generation, run)
    codebooks = (image_family(one).codebook for one in (setup.target, model))
    return LowResolutionParts(model, processor, build_resampler(*codebooks))


def fit_parts(setup: Setup[LowResolutionPlan], parts: LowResolutionParts) -> None:
    """Train the resampler on encoded scenes, then on images that the target generates."""
    plan, run, target = setup.plan, setup.run, setup.target
    count = run.limit_steps(plan.encoded, _PER_STEP)
    pairs = encode_scene_pairs(target.model.vqmodel, count, run)
    train_resampler(parts.resampler, pairs, plan.upsampling, run)
    count = run.limit_steps(plan.generated, _PER_STEP)
    other = run.with_seed_offset(1)
    pairs = generate_scene_pairs(parts.resampler, target, models.processor(), count, other)
    train_resampler(parts.resampler, pairs, plan.distillation, run)


def save_parts(setup: Setup[LowResolutionPlan], parts: LowResolutionParts, folder: Path) -> None:
    """Write model, processor and resampler, in float16."""
    parts.model.half().save_pretrained(folder)
    parts.processor.save_pretrained(folder)
    parts.resampler.half().save_pretrained(folder / FOLDER)


def train_generation_of_kinds(
    model: Any, examples: Iterator[CodeExample], decay: CosineDecay, run: TrainingRun
) -> None:
    """Train the language model on codes, and on the name, colour and size that each represents.

    A prompt contains these attributes, which are learned much faster than their combinations.
    """
    heads = nn.Linear(model.config.text_config.hidden_size, sum(BOARD_CLASSES))

    def loss_of(example: CodeExample) -> torch.Tensor:
        states = states_of(model, example.prompts, example.codes)
        logits = model.model.generation_head(states).flatten(0, 1)
        error = functional.cross_entropy(logits, example.codes.flatten())
        return error + board_loss(heads(states), kind_attributes(example.codes))

    matrices, others = generation_parameters(model)
    others = [*others, *heads.parameters()]
    fit(others, examples, loss_of, decay, "draw", run, matrices)


def evaluate(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Correct codes of small images, and codes per target call of exact and of lossy drafting."""
    assert entry.target is not None
    small, target = load(entry, folder), load_teacher(entry.target)
    examples = prompts(count, "held-out")
    found = generate_codes(small, models.processor(SMALL), [one.text for one in examples])
    expected = encode_kinds([one.scene for one in examples])
    report = {
        name: round(float((found == expected)[part].float().mean()), 4)
        for name, part in {"things": expected > 0, "blanks": expected == 0}.items()
    }
    for name, verifier in (("codes_per_call_exact", "coupled"), ("codes_per_call", None)):
        options: dict[str, Any] = {"processor": models.processor(), "verifier": verifier}
        fast = accelerate(target, "mulo-sd", drafter=small, **options)
        calls = []
        for number, one in enumerate(examples):
            images = fast.generate_images(
                prompt=one.text, temperature=1.0, guidance=models.GUIDANCE, seed=number
            )
            calls.append(images.stats.target_calls)
        report[name] = round(models.SIDE**2 / fmean(calls), 2)
    return report


TRAINER = CheckpointTrainer(
    about=f"""\
Generates the Scene world of the `mmspec` zoo in {SMALL.pixels} x {SMALL.pixels} pixels, \
{SMALL.side} x {SMALL.side} codes out of
{SMALL.codes}: one for every name, colour and size of a thing, and one for a blank cell. Drafts for
`image` with the recipe `mulo-sd`. The resampler between the codes of both is in the
folder `{FOLDER}`.

The model is trained on scenes. The resampler is trained on scenes in the target's codes, then on
the target's distributions of the codes of its own images.
""",
    notes=f"""\
`things` and `blanks` are the shares of correct codes in small images of held-out prompts,
in cells that hold a thing and in blank cells. `codes per call` are codes of the target's
images over its calls with the default `mulo-sd`, which is lossy, and `exact` with
`verifier="coupled"`. All are measured on the float16 weights, run in float32, at
temperature 1 and guidance {models.GUIDANCE}.
""",
    held_out=64,
    plans={"image-sketch": LowResolutionPlan()},
    build=build_parts,
    fit=fit_parts,
    save=save_parts,
    evaluate=evaluate,
    decays=lambda plan: [plan.generation],
    modules=lambda parts: [parts.model, parts.resampler],
)
ABOUT, NOTES, HELD_OUT, PLANS = TRAINER.about, TRAINER.notes, TRAINER.held_out, TRAINER.plans
train, measure = TRAINER.train, TRAINER.measure
