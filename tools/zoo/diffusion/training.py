"""Train the parts of the text-to-image pipeline in sequence.

First the autoencoder, then the text encoder (by predicting the contents of each cell), then the
denoiser; a drafter is trained on the target's predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.training.fitting import (
    CosineDecay,
    TrainingRun,
    fit,
    iterate_chunks,
    shuffle_batches,
    split_parameters,
)
from mmspec.zoo.prompts import iterate_training_scenes, write_varied_prompt
from mmspec.zoo.scene import BOARD, Scene, Style, add_tiles
from mmspec.zoo.scene_tensors import (
    BOARD_CLASSES,
    arrange_things,
    board_loss,
    encode_boards,
    iterate_thing_groups,
    render_images,
)
from tools.zoo.diffusion.models import TEXT_WIDTH
from tools.zoo.image.coding import occupied_codes

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, DDPMScheduler, PixArtTransformer2DModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

T = TypeVar("T")
Predict = Callable[[Tensor, Tensor, T], Tensor]  # (B, C, H, W), (B,), text -> (B, C, H, W)
_DISTURBANCE = 0.1  # noise on latents in training, so that a denoiser may be slightly wrong
_MAX_LATENT = 1.5  # latents above are penalised
_DROPOUT = 0.1  # share of empty prompts, for guidance
_OBJECT_WEIGHT = 3.0  # of cells with a thing on tiles, in training the autoencoder


@dataclass(frozen=True)
class WeightedImages:
    """Images (B, 3, P, P) from -1 to 1, and loss weights of their pixels (B, 1, P, P)."""

    images: Tensor
    weights: Tensor


@dataclass(frozen=True)
class TextStates:
    """`states` (B, L, D) of the text encoder, and their attention mask (B, L)."""

    states: Tensor
    mask: Tensor


def train_autoencoder(
    autoencoder: AutoencoderTiny, steps: int, run: TrainingRun, style: Style = "plain"
) -> None:
    """Train the autoencoder on crowded scenes, with noise and a size penalty on latents.

    On tiles, pixels of cells with a thing weigh more: backgrounds need less precision.
    """
    coder: Any = autoencoder

    def loss_of(item: WeightedImages) -> Tensor:
        latents: Tensor = coder.encoder(item.images)
        noisy = latents + _DISTURBANCE * torch.randn_like(latents)
        error: Tensor = coder.decoder(noisy) - item.images
        excess = functional.relu(latents.abs() - _MAX_LATENT)
        large = 1e-3 * latents.square().mean() + 0.1 * excess.square().mean()
        return _pixel_loss(error, item.weights) + large

    parameters, batches = list(coder.parameters()), _image_batches(8, run.seed, style)
    fit(parameters, batches, loss_of, CosineDecay(steps, 4e-3), "paint", run)


def train_decoder(
    autoencoder: AutoencoderTiny, steps: int, run: TrainingRun, style: Style = "plain"
) -> None:
    """Train the decoder alone, with half the noise on its latents, which stay as they are."""
    coder: Any = autoencoder

    def loss_of(item: WeightedImages) -> Tensor:
        with torch.no_grad():
            latents = coder.encoder(item.images)
        noisy = latents + 0.5 * _DISTURBANCE * torch.randn_like(latents)
        return _pixel_loss(coder.decoder(noisy) - item.images, item.weights)

    parameters, batches = list(coder.decoder.parameters()), _image_batches(8, run.seed + 1, style)
    fit(parameters, batches, loss_of, CosineDecay(steps, 3e-3), "decode", run)


def _pixel_loss(error: Tensor, weights: Tensor) -> Tensor:  # (B, 3, P, P), (B, 1, P, P) -> ()
    each = error.square() + 0.1 * error.abs()
    return (each * weights).mean() / weights.mean()


def train_text_encoder(
    encoder: nn.Module,
    layers: nn.Module,
    encode: Callable[[list[str]], TextStates],
    steps: int,
    run: TrainingRun,
) -> None:
    """Train a text encoder so that nine learned queries predict the contents of cells.

    `layers` are those of the encoder whose weight matrices get orthogonal updates.
    """
    reader = _BoardReader()

    def loss_of(item: tuple[list[str], Tensor]) -> Tensor:
        texts, labels = item
        return board_loss(reader(encode(texts)), labels)

    matrices, others = split_parameters(layers, encoder.parameters())
    others = [*others, *reader.parameters()]
    batches = _board_batches(64, run.seed)
    fit(others, batches, loss_of, CosineDecay(steps, 1.5e-3), "read", run, matrices)


def train_denoiser(
    denoiser: nn.Module,
    predict: Predict[T],
    schedule: DDPMScheduler,
    batches: Iterator[tuple[Tensor, T]],
    decay: CosineDecay,
    run: TrainingRun,
    teach: Predict[T] | None = None,
) -> None:
    """Train a denoiser on velocities (Salimans & Ho 2022), or on the predictions of `teach`.

    `predict` calls the denoiser.
    """

    def loss_of(item: tuple[Tensor, T]) -> Tensor:
        latents, text = item
        times = torch.randint(schedule.config["num_train_timesteps"], (len(latents),))
        noise = torch.randn_like(latents)
        noisy = schedule.add_noise(latents, noise, times)
        if teach is None:
            expected = schedule.get_velocity(latents, noise, times)
        else:
            with torch.no_grad():
                expected = teach(noisy, times, text)
        return functional.mse_loss(predict(noisy, times, text), expected)

    layers: Any = getattr(denoiser, "transformer_blocks", denoiser)  # a U-Net has no such stack
    matrices, others = split_parameters(layers, denoiser.parameters())
    fit(others, batches, loss_of, decay, "draw", run, matrices)


def predict_velocity(
    denoiser: PixArtTransformer2DModel, noisy: Tensor, times: Tensor, text: TextStates
) -> Tensor:
    """The output of a denoiser at states (B, C, H, W) and timesteps (B,)."""
    model: Any = denoiser
    out: Tensor = model(
        noisy,
        encoder_hidden_states=text.states,
        encoder_attention_mask=text.mask,
        timestep=times,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample
    return out


def encode_prompts(
    encoder: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> TextStates:
    """Encode prompts by a T5 encoder, padded to the longest one."""
    encoding = tokenizer(texts, padding=True, return_tensors="pt")
    mask: Any = encoding.attention_mask
    read: Any = encoder
    return TextStates(read(encoding.input_ids, attention_mask=mask)[0], mask)


def example_batches(
    encode: Callable[[list[str]], T],
    autoencoder: AutoencoderTiny,
    pool: int,
    batch: int,
    run: TrainingRun,
    style: Style = "plain",
) -> Iterator[tuple[Tensor, T]]:
    """Infinite batches of scaled latents and encoded prompts, from `pool` scenes encoded before.

    The prompt of a scene is sampled again in every epoch.
    """
    scenes = sample_training_scenes(pool, run.seed, style)
    chunks = iterate_chunks(scenes, batch, "encode", run.progress)
    with torch.no_grad():
        latents = torch.cat([encode_scenes(autoencoder, part) for part in chunks])
    generator = np.random.default_rng((run.seed, 4))

    def sample_batches() -> Iterator[tuple[Tensor, T]]:
        for picks in shuffle_batches(len(scenes), batch, generator):
            prompts = [
                "" if generator.random() < _DROPOUT else write_varied_prompt(scenes[i], generator)
                for i in picks
            ]
            with torch.no_grad():
                text = encode(prompts)
            yield latents[torch.from_numpy(picks)], text

    return sample_batches()


def sample_training_scenes(count: int, seed: int, style: Style) -> list[Scene]:
    """Training scenes of prompts, on paper ("plain") or on tiles ("tiled")."""
    generator = np.random.default_rng((seed, 19))
    scenes = islice(iterate_training_scenes(seed), count)
    return [add_tiles(scene, generator) if style == "tiled" else scene for scene in scenes]


def encode_scenes(
    autoencoder: AutoencoderTiny, scenes: Sequence[Scene]
) -> Tensor:  # -> (B, 4, 12, 12)
    """Scaled latents of scenes."""
    coder: Any = autoencoder
    latents: Tensor = coder.encoder(render_images(scenes)) * coder.config.scaling_factor
    return latents


class _BoardReader(nn.Module):
    """Nine learned queries attend to the text states and predict name, colour and size."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = nn.Parameter(torch.randn(BOARD * BOARD, TEXT_WIDTH) / TEXT_WIDTH**0.5)
        self.attention = nn.MultiheadAttention(TEXT_WIDTH, 4, batch_first=True)
        self.heads = nn.Linear(TEXT_WIDTH, sum(BOARD_CLASSES))

    def forward(self, text: TextStates) -> Tensor:  # -> (B, 9, classes)
        queries = self.questions.expand(len(text.states), -1, -1)
        found, _ = self.attention(queries, text.states, text.states, text.mask == 0)
        answers: Tensor = self.heads(found)
        return answers


def _board_batches(batch: int, seed: int) -> Iterator[tuple[list[str], Tensor]]:
    """Varied prompts, and the contents of each cell (B, 9, 3)."""
    generator = np.random.default_rng((seed, 5))
    source = iterate_training_scenes(seed)
    while True:
        scenes = list(islice(source, batch))
        yield [write_varied_prompt(scene, generator) for scene in scenes], encode_boards(scenes)


def _image_batches(batch: int, seed: int, style: Style) -> Iterator[WeightedImages]:
    """Images with a thing in two thirds of the cells, for a dense training signal."""
    generator = np.random.default_rng((seed, 6))
    tiles = np.random.default_rng((seed, 20))
    crowd = iterate_thing_groups(1 << 45)
    while True:
        cells = [np.flatnonzero(generator.random(BOARD**2) < 2 / 3) for _ in range(batch)]
        scenes = [arrange_things(next(crowd), some) for some in cells]
        if style == "tiled":
            scenes = [add_tiles(scene, tiles) for scene in scenes]
        images = render_images(scenes)
        weights = torch.ones_like(images[:, :1])
        if style == "tiled":
            occupied = occupied_codes(scenes, images.shape[-1]).unflatten(1, images.shape[-2:])
            weights += (_OBJECT_WEIGHT - 1) * occupied[:, None]
        yield WeightedImages(images, weights)
