"""Train the bundled diffusion checkpoints from a seed, in minutes on one CPU core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec.modalities.diffusion.checkpoints import load
from mmspec.modality import Entry
from mmspec.training.fitting import CosineDecay, TrainingRun
from mmspec.zoo.prompts import prompts
from mmspec.zoo.scene import Style
from mmspec.zoo.training import load_teacher
from tools.zoo.diffusion import models
from tools.zoo.diffusion.evaluate import score_generated_images, state_overlap
from tools.zoo.diffusion.training import (
    TextStates,
    encode_prompts,
    encode_scenes,
    example_batches,
    predict_velocity,
    sample_training_scenes,
    train_autoencoder,
    train_decoder,
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
    decoder: int = 0
    text_encoder: int = 0
    base: str | None = None  # checkpoint whose weights are trained on
    style: Style = "plain"  # of the scenes
    is_deterministic: bool = False  # the sampler that the pipeline is saved with
    also_steps: int | None = None  # in the evaluation, beside those of the entry


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
    base = None if plan.base is None else load_teacher(plan.base)
    if base is not None:
        encoders = base.tokenizer, base.text_encoder, _train_autoencoder(base.vae, plan, run)
    elif target is None:
        encoders = _train_encoders(plan, run)
    else:
        encoders = target.tokenizer, target.text_encoder, target.vae
        run = run.with_seed_offset(1)
    tokenizer, text, coder = encoders
    pool = run.limit_steps(plan.pool, BATCH)
    examples = example_batches(
        partial(encode_prompts, text, tokenizer), coder, pool, BATCH, run, plan.style
    )
    denoiser = (
        models.denoiser(plan.shape)
        if base is None
        else models.prune_layers(base.transformer, plan.shape)
    )
    return DiffusionParts(*encoders, denoiser, examples, run)


def fit_parts(setup: Setup[DenoiserPlan], parts: DiffusionParts) -> None:
    """Train the denoiser, on the predictions of the target if there is one."""
    target = setup.target
    teach = None if target is None else partial(predict_velocity, target.transformer)
    decay, scheduler = setup.plan.generation, models.scheduler()
    predict = partial(predict_velocity, parts.denoiser)
    train_denoiser(parts.denoiser, predict, scheduler, parts.examples, decay, parts.run, teach)


def save_parts(setup: Setup[DenoiserPlan], parts: DiffusionParts, folder: Path) -> None:
    """Write the pipeline, or the denoiser of a drafter, in float16."""
    denoiser = parts.denoiser.half()
    if setup.target is None:  # the text encoder stays in float32: it is loaded as stored
        encoders = (parts.tokenizer, parts.text_encoder, parts.coder.half())
        pipe = models.pipeline(*encoders, denoiser, setup.plan.is_deterministic)
        pipe.save_pretrained(folder)
    else:
        denoiser.save_pretrained(folder)


def evaluate(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Correct facts in images (a target), or the acceptance rate of states (a drafter)."""
    examples, model = prompts(count, "held-out"), load(entry, folder)
    if entry.target is None:
        steps, guidance = entry.settings["steps"], entry.settings["guidance"]
        found = {"facts": score_generated_images(model, examples, steps, guidance)}
        more = PLANS[entry.name].also_steps
        if more is not None:
            found[f"facts_in_{more}_steps"] = score_generated_images(
                model, examples, more, guidance
            )
        return {name: round(right / total, 4) for name, (right, total) in found.items()}
    texts = [prompt.text for prompt in examples[:16]]
    return {"acceptance": state_overlap(model, load_teacher(entry.target), texts)}


def _train_encoders(
    plan: DenoiserPlan, run: TrainingRun
) -> tuple[PreTrainedTokenizerFast, T5EncoderModel, Any]:
    """Tokenizer, text encoder and autoencoder, trained before the denoiser."""
    tokenizer = models.tokenizer()
    coder = _train_autoencoder(models.autoencoder(), plan, run)
    text = models.text_encoder(len(tokenizer))
    encode = partial(encode_prompts, text, tokenizer)
    train_text_encoder(text, text.encoder.block, encode, plan.text_encoder, run)
    return tokenizer, text, coder


def _train_autoencoder(
    coder: AutoencoderTiny, plan: DenoiserPlan, run: TrainingRun
) -> AutoencoderTiny:
    """The trained autoencoder, with a scaling factor that gives latents unit variance."""
    train_autoencoder(coder, plan.autoencoder, run, plan.style)
    with torch.no_grad():
        spread = encode_scenes(coder, sample_training_scenes(256, run.seed, plan.style)).std()
    factor = float(spread) / coder.config["scaling_factor"]  # of unscaled latents
    scaled = models.autoencoder(scaling=round(1 / factor, 4))
    scaled.load_state_dict(coder.state_dict())
    if plan.decoder:
        train_decoder(scaled, plan.decoder, run, plan.style)
    return scaled


TRAINER = CheckpointTrainer(
    about="""\
Generates the Scene world of the `mmspec` zoo in 48 x 48 pixels: one to three coloured
shapes or written digits on a board of nine places. An example prompt is "a large red
circle in the top left corner and a small blue star in the center". Its images
have a single size: where diffusers loads it, call it with `use_resolution_binning=False`.

Autoencoder, text encoder and denoiser are trained on scenes, one after the other. The drafter is
trained to predict what the target's denoiser predicts. `diffusion-textured` generates scenes on
tiles: pale ones behind things, materials in empty cells. Its text encoder is that of `diffusion`,
from whose autoencoder and denoiser, of which six layers are kept, its training starts.
""",
    notes=f"""\
`facts` is the share of correct facts (size, colour, name and place of each thing) that
`mmspec.zoo.scene_parser` finds in images of held-out prompts, with the checkpoint's own settings:
{models.STEPS} steps and guidance {models.GUIDANCE}, of `diffusion-textured` 28 steps and another
guidance (`mmspec.zoo.info(NAME).settings`); `acceptance` is the overlap of the drafter's
distribution of the next state with the target's, averaged over states sampled by the target.
Both are measured on the float16 weights, run in float32.
""",
    held_out=64,
    plans={
        "diffusion": DenoiserPlan(
            models.TARGET, CosineDecay(2400, 1.5e-3), 16384, autoencoder=800, text_encoder=600
        ),
        "diffusion-textured": DenoiserPlan(
            models.TEXTURED,
            CosineDecay(4000, 1.2e-3),
            12288,
            autoencoder=1200,
            decoder=1200,
            base="diffusion",
            style="tiled",
            is_deterministic=True,
            also_steps=50,
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
