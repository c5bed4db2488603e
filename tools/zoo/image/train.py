"""Train the bundled Janus checkpoints from a seed, on one CPU core: target, drafter and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from mmspec.api import accelerate
from mmspec.modalities.image.checkpoints import load
from mmspec.modalities.image.families import reader as reader_of
from mmspec.modality import Entry
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.training.fitting import CosineDecay, iterate_chunks
from mmspec.training.heads import EAGLE
from mmspec.training.trainable import train_head
from mmspec.zoo.prompts import prompts
from mmspec.zoo.training import load_teacher
from tools.zoo.image import models
from tools.zoo.image.coding import render_tiled_scenes, train_autoencoder, train_codebook
from tools.zoo.image.distil import (
    compute_target_logits,
    distil_drafter,
    generate_target_codes,
    head_examples,
    init_from_target,
)
from tools.zoo.image.evaluate import code_statistics, score_generated_images, score_reconstructions
from tools.zoo.image.training import (
    PromptEncoder,
    encode_pool,
    example_batches,
    train_generation,
    train_lookup,
)
from tools.zoo.trainer import CheckpointTrainer, Setup

BATCH = 32
HEAD_BATCH = 16
PICTURES = 4096  # images that the autoencoder is trained on


@dataclass(frozen=True)
class ImagePlan:
    """Steps of each stage, and the number of scenes."""

    shape: models.ImageShape | None  # None is a feature head with the target's widths
    generation: tuple[CosineDecay, ...]  # in sequence; a drafter or a head needs one
    pool: int
    autoencoder: int = 0
    codebook: int = 0
    lookup: int = 0


@dataclass(frozen=True)
class ImageParts:
    """The model, its processor, and prompts with the target's codes for a drafter or a head."""

    model: Any
    processor: Any
    samples: tuple[list[str], Tensor] | None


def build_parts(setup: Setup[ImagePlan]) -> ImageParts:
    """Generate the target's samples, if there is a target, and initialise the model."""
    plan, run, target = setup.plan, setup.run, setup.target
    processor, samples = models.processor(), None
    if target is not None:
        pool = run.limit_steps(plan.pool, BATCH)
        samples = generate_target_codes(target, processor, pool, run.with_seed_offset(1))
    if plan.shape is not None:
        model: Any = models.janus(plan.shape, processor.tokenizer)
    else:
        text = target.config.get_text_config(decoder=True)
        model = FeatureHead(FeatureHeadConfig.of(text, models.CODES))
    return ImageParts(model, processor, samples)


def fit_parts(setup: Setup[ImagePlan], parts: ImageParts) -> None:
    """Train a target on scenes, or distil a drafter or a head from one."""
    plan, run, target, model = setup.plan, setup.run, setup.target, parts.model
    if parts.samples is None:
        _fit_target(plan, model, parts.processor, setup)
    elif plan.shape is None:
        examples = head_examples(target, parts.processor, *parts.samples, HEAD_BATCH, run.seed)
        decay = plan.generation[0]
        count = run.limit_steps(decay.steps)
        settings = (examples, count, decay.rate, run.progress)
        train_head(EAGLE, reader_of(target), model, *settings, weight=0.5)
    else:
        init_from_target(model, target)
        logits = compute_target_logits(target, parts.processor, *parts.samples)
        encoder = PromptEncoder(parts.processor.tokenizer)
        distil_drafter(model, encoder, logits, plan.generation[0], run)


def _fit_target(plan: ImagePlan, model: Any, processor: Any, setup: Setup[ImagePlan]) -> None:
    run, encoder, coder = setup.run, PromptEncoder(processor.tokenizer), model.model.vqmodel
    images = render_tiled_scenes(run.limit_steps(PICTURES, BATCH), run)
    train_autoencoder(coder, images, plan.autoencoder, run)
    train_codebook(coder, images, plan.codebook, run)
    train_lookup(model, encoder, plan.lookup, run)
    scenes, codes = encode_pool(coder, run.limit_steps(plan.pool, BATCH), run)
    for number, decay in enumerate(plan.generation):
        examples = example_batches(scenes, codes, encoder, BATCH, run.seed + number)
        train_generation(model, examples, decay, run)


def save_parts(setup: Setup[ImagePlan], parts: ImageParts, folder: Path) -> None:
    """Write the model in float16, with its processor unless it is a head."""
    parts.model.half().save_pretrained(folder)
    if setup.plan.shape is not None:
        parts.processor.save_pretrained(folder)


def evaluate(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Correct facts in images (a target), or acceptance length (a drafter)."""
    examples, model = prompts(count, "held-out"), load(entry, folder)
    processor, texts = models.processor(), [prompt.text for prompt in examples]
    if entry.target is None:
        right, total = score_generated_images(model, processor, examples)
        found, shown = score_reconstructions(model, [prompt.scene for prompt in examples])
        nats, share = code_statistics(model, processor, texts)
        return {
            "facts": round(right / total, 4),
            "facts_of_scenes": round(found / shown, 4),
            "entropy": round(nats, 2),
            "commonest_code": round(share, 4),
        }
    return {"acceptance_length": acceptance(model, load_teacher(entry.target), processor, texts)}


def acceptance(
    drafter: Any, target: Any, processor: Any, texts: Sequence[str], batch: int = 16
) -> float:
    """Codes per round of coupled chain speculation with five drafted codes, at temperature 1."""
    fast = accelerate(target, "coupled", drafter=drafter, processor=processor)
    settings: dict[str, Any] = {"do_sample": True, "guidance": models.GUIDANCE, "seed": 0}
    lengths = []
    for part in iterate_chunks(texts, batch):
        images = fast.generate_images(prompt=list(part), **settings)
        lengths += [images.stats.mean_acceptance_length] * len(part)
    return round(fmean(lengths), 2)


TRAINER = CheckpointTrainer(
    about=f"""\
Generates the Scene world of the `mmspec` zoo in {models.PIXELS} x {models.PIXELS} pixels, \
{models.SIDE} x {models.SIDE} codes
out of {models.CODES}: one to three coloured shapes or written digits on pale tiles of a
board of nine places, and clouds, grass, bricks, water or sand in all others. An example
prompt is "a large red circle in the top left corner and a small blue star in the center".
The vision encoder that the class requires is untrained: the model only generates images.

Autoencoder, codebook and language model are trained on scenes, one after the other, the language
model in several decays of the learning rate. Drafters are trained on images of the target.
""",
    notes=f"""\
`facts` is the share of correct facts (size, colour, name and place of each thing) that
`mmspec.zoo.scene_parser` finds in images of held-out prompts; `facts of scenes` is that
of images of their scenes, encoded and decoded; `entropy` is the mean entropy of the guided
distributions of the codes of its own images, in nats, and `commonest code` the share of the
most frequent code; `acceptance length` is codes per round of coupled chain speculation with
five drafted codes. All are measured on the float16 weights, run in float32, at temperature 1
and guidance {models.GUIDANCE}.
""",
    held_out=128,
    plans={
        "image": ImagePlan(
            models.TARGET,
            (
                CosineDecay(1850, 1.5e-3),
                CosineDecay(700, 1.5e-3),
                CosineDecay(900, 1.5e-3),
                CosineDecay(700, 1.2e-3),
            ),
            pool=12288,
            autoencoder=1200,
            codebook=1900,
            lookup=500,
        ),
        "image-drafter": ImagePlan(models.DRAFTER, (CosineDecay(1600, 2e-3),), 1536),
        "image-head": ImagePlan(None, (CosineDecay(500, 2e-3),), 1536),
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
