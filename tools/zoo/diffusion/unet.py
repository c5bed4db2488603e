"""Train the bundled U-Net: a Stable Diffusion pipeline that draws what `diffusion-textured` does.

Its own text encoder is trained first, then its U-Net on the predictions of the transformer of
`diffusion-textured` for the same states and prompts, whose autoencoder it shares. A teacher's
predictions are means over the images of a prompt, so they take fewer steps to learn than velocities
of single images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec.modalities.diffusion.checkpoints import StableDiffusionPipeline, load
from mmspec.modality import Entry
from mmspec.training.fitting import CosineDecay
from mmspec.zoo.prompts import prompts
from mmspec.zoo.scene_tensors import LATENT_CHANNELS, LATENT_SIDE
from mmspec.zoo.training import load_teacher
from tools.zoo.diffusion import models
from tools.zoo.diffusion.evaluate import MAX_SEQUENCE_LENGTH, score_generated_images
from tools.zoo.diffusion.training import (
    TextStates,
    encode_prompts,
    example_batches,
    predict_velocity,
    train_denoiser,
    train_text_encoder,
)
from tools.zoo.trainer import CheckpointTrainer, Setup

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel, PreTrainedTokenizerFast

BATCH = 32
TEACHER = "diffusion-textured"
_HEADS = 4
_STEPS = (28, 50)  # in the evaluation
_PERIOD = 1e4  # the longest of the initial position embeddings, in words


@dataclass(frozen=True)
class UNetPlan:
    """Channels per level, steps of each stage, and the number of scenes."""

    channels: tuple[int, ...]
    generation: CosineDecay
    pool: int
    text_encoder: int


@dataclass(frozen=True)
class Texts:
    """The same prompts as the U-Net and as its teacher read them."""

    student: Tensor  # (B, L, D)
    teacher: TextStates


@dataclass(frozen=True)
class UNetParts:
    """The parts of the pipeline, its teacher, and the training examples."""

    tokenizer: PreTrainedTokenizerFast
    text_encoder: CLIPTextModel
    coder: Any
    denoiser: UNet2DConditionModel
    teacher: Any
    examples: Iterator[tuple[Tensor, Texts]]


def text_encoder(vocabulary: int) -> CLIPTextModel:
    """A causal CLIP encoder of three layers.

    Words and positions of unit variance, positions as sines: with the small random ones of CLIP it
    takes twice as long to learn which colour belongs to which shape.
    """
    from transformers import CLIPTextConfig, CLIPTextModel

    width = models.TEXT_WIDTH
    encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=3,
            num_attention_heads=_HEADS,
            max_position_embeddings=MAX_SEQUENCE_LENGTH,
            hidden_act="gelu",
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )
    embeddings: Any = encoder.embeddings
    angles = torch.arange(float(MAX_SEQUENCE_LENGTH))[:, None] * _PERIOD ** -torch.arange(
        0, 1, 2 / width
    )
    with torch.no_grad():
        embeddings.token_embedding.weight.normal_()
        embeddings.position_embedding.weight.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))
    return encoder


def unet(channels: tuple[int, ...]) -> UNet2DConditionModel:
    """A U-Net with attention to the prompt on all levels but the first.

    The lowest of three levels has 3 x 3 states, one per cell of the board.
    """
    from diffusers import UNet2DConditionModel

    lower = len(channels) - 1
    return UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=channels,
        down_block_types=("DownBlock2D",) + ("CrossAttnDownBlock2D",) * lower,
        up_block_types=("CrossAttnUpBlock2D",) * lower + ("UpBlock2D",),
        layers_per_block=1,
        cross_attention_dim=models.TEXT_WIDTH,
        attention_head_dim=_HEADS,  # as published: their number
        norm_num_groups=8,
        use_linear_projection=True,
    )


def encode_padded(
    encoder: CLIPTextModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> TextStates:
    """Encode prompts as the pipeline does: padded to the full length, padding is attended to."""
    encoding = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")
    ids: Any = encoding.input_ids
    read: Any = encoder
    return TextStates(read(ids)[0], torch.ones_like(ids))


def build_parts(setup: Setup[UNetPlan]) -> UNetParts:
    """Train the text encoder, and initialise the U-Net."""
    plan, run, teacher = setup.plan, setup.run, load_teacher(TEACHER)
    tokenizer = models.tokenizer()
    tokenizer.model_max_length = MAX_SEQUENCE_LENGTH
    text = text_encoder(len(tokenizer))
    encode = partial(encode_padded, text, tokenizer)
    train_text_encoder(text, text.encoder.layers, encode, plan.text_encoder, run)

    def encode_twice(texts: list[str]) -> Texts:
        taught = encode_prompts(teacher.text_encoder, teacher.tokenizer, texts)
        return Texts(encode(texts).states, taught)

    pool = run.limit_steps(plan.pool, BATCH)
    examples = example_batches(encode_twice, teacher.vae, pool, BATCH, run, "tiled")
    coder = models.autoencoder(scaling=teacher.vae.config.scaling_factor)  # without a path
    coder.load_state_dict(teacher.vae.state_dict())
    return UNetParts(tokenizer, text, coder, unet(plan.channels), teacher, examples)


def fit_parts(setup: Setup[UNetPlan], parts: UNetParts) -> None:
    """Train the U-Net on the predictions of the teacher."""
    student: Any = parts.denoiser

    def predict(noisy: Tensor, times: Tensor, texts: Texts) -> Tensor:
        out: Tensor = student(noisy, times, encoder_hidden_states=texts.student).sample
        return out

    def teach(noisy: Tensor, times: Tensor, texts: Texts) -> Tensor:
        return predict_velocity(parts.teacher.transformer, noisy, times, texts.teacher)

    decay, scheduler = setup.plan.generation, models.scheduler()
    train_denoiser(student, predict, scheduler, parts.examples, decay, setup.run, teach)


def save_parts(setup: Setup[UNetPlan], parts: UNetParts, folder: Path) -> None:
    """Write the pipeline, with a deterministic sampler; all but the text encoder in float16."""
    build: Any = StableDiffusionPipeline
    pipe = build(
        vae=parts.coder.half(),
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        unet=parts.denoiser.half(),
        scheduler=models.solver(steps_offset=1),  # the only one that the pipeline takes
    )
    pipe.save_pretrained(folder)


def evaluate(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Correct facts in images of held-out prompts."""
    examples, model = prompts(count, "held-out"), load(entry, folder)
    found = {}
    for steps in _STEPS:
        right, total = score_generated_images(model, examples, steps, entry.settings["guidance"])
        found[f"facts_in_{steps}_steps"] = round(right / total, 4)
    return found


TRAINER = CheckpointTrainer(
    about=f"""\
Generates the Scene world of the `mmspec` zoo in 48 x 48 pixels: one to three coloured shapes or
written digits on a board of nine textured tiles. An example prompt is "a large red circle in the
top left corner and a small blue star in the center". `StableDiffusionPipeline` with a
`UNet2DConditionModel` of 12 x 12, 6 x 6 and 3 x 3 states, a `CLIPTextModel` whose tokens are words,
and the autoencoder of `{TEACHER}`.

The text encoder is trained to tell the contents of each cell, the U-Net to predict what the
transformer of `{TEACHER}` predicts for the same states and prompts.
""",
    notes="""\
Facts are sizes, colours, names and places of things: the share of correct ones that
`mmspec.zoo.scene_parser` finds in images of 64 held-out prompts, with the sampler and the guidance
of the checkpoint (`mmspec.zoo.info(NAME).settings`), measured on the float16 weights, run in
float32.
""",
    held_out=64,
    plans={
        "diffusion-unet": UNetPlan((32, 64, 96), CosineDecay(4200, 1.5e-3), 6144, text_encoder=400)
    },
    build=build_parts,
    fit=fit_parts,
    save=save_parts,
    evaluate=evaluate,
    decays=lambda plan: [plan.generation],
    modules=lambda parts: [parts.denoiser],
)
ABOUT, NOTES, HELD_OUT, PLANS = TRAINER.about, TRAINER.notes, TRAINER.held_out, TRAINER.plans
train, measure = TRAINER.train, TRAINER.measure
