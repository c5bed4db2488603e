"""Train the bundled diffusion checkpoints from a seed, in minutes on one CPU core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec.modalities.diffusion.checkpoints import load
from mmspec.modality import Entry
from mmspec.training.fitting import CosineDecay, TrainingRun
from mmspec.zoo.prompts import iterate_training_scenes, prompts
from mmspec.zoo.training import load_teacher
from tools.zoo.diffusion import models
from tools.zoo.diffusion.evaluate import score_generated_images, state_overlap
from tools.zoo.diffusion.training import (
    TextStates,
    encode_scenes,
    example_batches,
    train_autoencoder,
    train_denoiser,
    train_text_encoder,
)
from tools.zoo.trainer import CheckpointTrainer, Setup

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

BATCH = 64


@dataclass(frozen=True)
class DenoiserPlan:
    """Steps of each stage, and the number of scenes."""

    shape: models.DenoiserShape
    generation: CosineDecay
    pool: int
    autoencoder: int = 0
    text_encoder: int = 0


@dataclass(frozen=True)
class DiffusionParts:
    """The parts of a pipeline, and the training examples of its denoiser."""

    tokenizer: PreTrainedTokenizerFast
    text_encoder: T5EncoderModel
    coder: Any
    denoiser: Any
    examples: Iterator[tuple[Tensor, TextStates]]
    run: TrainingRun  # with another seed for a drafter


def build_parts(setup: Setup[DenoiserPlan]) -> DiffusionParts:
    """Train the encoders of a target or take those of a drafter's, and initialise the denoiser."""
    plan, run, target = setup.plan, setup.run, setup.target
    if target is None:
        encoders = _train_encoders(plan, run)
    else:
        encoders = target.tokenizer, target.text_encoder, target.vae
        run = run.with_seed_offset(1)
    tokenizer, text, coder = encoders
    pool = run.limit_steps(plan.pool, BATCH)
    examples = example_batches(text, tokenizer, coder, pool, BATCH, run)
    return DiffusionParts(*encoders, models.denoiser(plan.shape), examples, run)


def fit_parts(setup: Setup[DenoiserPlan], parts: DiffusionParts) -> None:
    """Train the denoiser, on the predictions of the target if there is one."""
    teacher = None if setup.target is None else setup.target.transformer
    decay, scheduler = setup.plan.generation, models.scheduler()
    train_denoiser(parts.denoiser, scheduler, parts.examples, decay, parts.run, teacher)


def save_parts(setup: Setup[DenoiserPlan], parts: DiffusionParts, folder: Path) -> None:
    """Write the pipeline, or the denoiser of a drafter, in float16."""
    denoiser = parts.denoiser.half()
    if setup.target is None:  # the text encoder stays in float32: it is loaded as stored
        encoders = (parts.tokenizer, parts.text_encoder, parts.coder.half())
        models.pipeline(*encoders, denoiser).save_pretrained(folder)
    else:
        denoiser.save_pretrained(folder)


def evaluate(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Correct facts in images (a target), or the acceptance rate of states (a drafter)."""
    examples, model = prompts(count, "held-out"), load(entry, folder)
    if entry.target is None:
        right, total = score_generated_images(model, examples)
        return {"facts": round(right / total, 4)}
    texts = [prompt.text for prompt in examples[:16]]
    return {"acceptance": state_overlap(model, load_teacher(entry.target), texts)}


def _train_encoders(
    plan: DenoiserPlan, run: TrainingRun
) -> tuple[PreTrainedTokenizerFast, T5EncoderModel, Any]:
    """Tokenizer, text encoder and autoencoder, trained before the denoiser."""
    tokenizer, coder = models.tokenizer(), models.autoencoder()
    train_autoencoder(coder, plan.autoencoder, run)
    coder = _normalise_latents(coder, run.seed)
    text = models.text_encoder(len(tokenizer))
    train_text_encoder(text, tokenizer, plan.text_encoder, run)
    return tokenizer, text, coder


def _normalise_latents(coder: AutoencoderTiny, seed: int) -> AutoencoderTiny:
    """The same autoencoder with a scaling factor that gives latents unit variance."""
    with torch.no_grad():
        spread = encode_scenes(coder, list(islice(iterate_training_scenes(seed), 256))).std()
    scaled = models.autoencoder(scaling=round(1 / float(spread), 4))
    scaled.load_state_dict(coder.state_dict())
    return scaled


TRAINER = CheckpointTrainer(
    about="""\
Generates the Scene world of the `mmspec` zoo in 48 x 48 pixels: one to three coloured
shapes or written digits on a board of nine places. An example prompt is "a large red
circle in the top left corner and a small blue star in the center". Its images
have a single size: where diffusers loads it, call it with `use_resolution_binning=False`.

Autoencoder, text encoder and denoiser are trained on scenes, one after the other. The drafter is
trained to predict what the target's denoiser predicts.
""",
    notes=f"""\
`facts` is the share of correct facts (size, colour, name and place of each thing) that
`mmspec.zoo.scene_parser` finds in images of held-out prompts, at {models.STEPS} steps and
guidance {models.GUIDANCE}; `acceptance` is the overlap of the drafter's distribution of the next
state with the target's, averaged over states sampled by the target.
Both are measured on the float16 weights, run in float32.
""",
    held_out=64,
    plans={
        "diffusion": DenoiserPlan(
            models.TARGET, CosineDecay(2400, 1.5e-3), 16384, autoencoder=800, text_encoder=600
        ),
        "diffusion-drafter": DenoiserPlan(models.DRAFTER, CosineDecay(1500, 1.5e-3), 8192),
    },
    build=build_parts,
    fit=fit_parts,
    save=save_parts,
    evaluate=evaluate,
    decays=lambda plan: [plan.generation],
)
ABOUT, NOTES, HELD_OUT, PLANS = TRAINER.about, TRAINER.notes, TRAINER.held_out, TRAINER.plans
train, measure = TRAINER.train, TRAINER.measure
