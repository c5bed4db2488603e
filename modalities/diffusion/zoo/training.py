"""Teach the parts of the text-to-image pipeline, one after the other.

First pictures (the autoencoder), then words (the text encoder, by telling what is at each place),
then drawing (the denoiser, from noise and words; a drafter learns from the target's predictions).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.modalities.diffusion.zoo.models import TEXT_WIDTH
from mmspec.zoo.batches import BOARD_CLASSES, board, pixels
from mmspec.zoo.fitting import fit
from mmspec.zoo.learning import Progress, silent
from mmspec.zoo.prompts import loose_prompt, training_scenes
from mmspec.zoo.scene import BOARD, Scene, Thing, sample

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, DDPMScheduler, PixArtTransformer2DModel
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

_DISTURBANCE = 0.1  # noise on latents in training, so that a denoiser may be slightly wrong
_REACH = 1.5  # largest latent that costs nothing
_NARROWEST = 6  # a weight with fewer rows or columns is a table, say of scales or of heads
_SILENCE = 0.1  # how often a denoiser is told nothing, for guidance


@dataclass(frozen=True)
class Words:
    """What a denoiser is told: `states` (B, L, D) of the text encoder and their mask (B, L)."""

    states: Tensor
    mask: Tensor


def learn_pictures(
    autoencoder: AutoencoderTiny,
    steps: int,
    seed: int,
    batch: int = 8,
    rate: float = 4e-3,
    progress: Progress = silent,
) -> None:
    """Train the autoencoder on crowded scenes, its latents slightly disturbed and kept small."""
    coder: Any = autoencoder

    def loss_of(images: Tensor) -> Tensor:
        latents: Tensor = coder.encoder(images)
        seen = latents + _DISTURBANCE * torch.randn_like(latents)
        error: Tensor = coder.decoder(seen) - images
        excess = functional.relu(latents.abs() - _REACH)
        large = 1e-3 * latents.square().mean() + 0.1 * excess.square().mean()
        return error.square().mean() + 0.1 * error.abs().mean() + large

    fit(list(coder.parameters()), _crowded(batch, seed), loss_of, steps, rate, "paint", progress)


def learn_words(
    encoder: T5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    seed: int,
    batch: int = 64,
    rate: float = 1.5e-3,
    progress: Progress = silent,
) -> None:
    """Train the text encoder until nine questions, one for each place, find their answers."""
    reader = _BoardReader()

    def loss_of(item: tuple[list[str], Tensor]) -> Tensor:
        texts, boards = item
        words = read_words(encoder, tokenizer, texts)
        parts = reader(words).split(BOARD_CLASSES, -1)
        losses = [
            functional.cross_entropy(p.flatten(0, 1), t.flatten())
            for p, t in zip(parts, boards.unbind(-1), strict=True)
        ]
        return torch.stack(losses).sum()

    blocks: Any = encoder.encoder.block
    matrices, others = _divided(encoder, blocks)
    others = [*others, *reader.parameters()]
    fit(others, _described(batch, seed), loss_of, steps, rate, "read", progress, matrices)


def learn_to_draw(
    denoiser: PixArtTransformer2DModel,
    schedule: DDPMScheduler,
    batches: Iterator[tuple[Tensor, Words]],
    steps: int,
    rate: float,
    progress: Progress = silent,
    teacher: PixArtTransformer2DModel | None = None,
) -> None:
    """Train a denoiser to predict velocity (Salimans & Ho 2022), or what `teacher` predicts."""

    def loss_of(item: tuple[Tensor, Words]) -> Tensor:
        latents, words = item
        times = torch.randint(schedule.config["num_train_timesteps"], (len(latents),))
        noise = torch.randn_like(latents)
        noisy = schedule.add_noise(latents, noise, times)
        if teacher is None:
            wanted = schedule.get_velocity(latents, noise, times)
        else:
            with torch.no_grad():
                wanted = predicted(teacher, noisy, times, words)
        return functional.mse_loss(predicted(denoiser, noisy, times, words), wanted)

    blocks: Any = denoiser.transformer_blocks
    matrices, others = _divided(denoiser, blocks)
    fit(others, batches, loss_of, steps, rate, "draw", progress, matrices)


def _divided(model: nn.Module, blocks: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weight matrices of the layers `blocks`, and all else; tables are not matrices."""
    matrices = [p for p in blocks.parameters() if p.dim() == 2 and min(p.shape) > _NARROWEST]
    chosen = set(map(id, matrices))
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def predicted(
    denoiser: PixArtTransformer2DModel, noisy: Tensor, times: Tensor, words: Words
) -> Tensor:
    """The output of a denoiser at states (B, C, H, W) and times (B,)."""
    model: Any = denoiser
    out: Tensor = model(
        noisy,
        encoder_hidden_states=words.states,
        encoder_attention_mask=words.mask,
        timestep=times,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample
    return out


def read_words(
    encoder: T5EncoderModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> Words:
    """Encode prompts, padded to the longest."""
    told = tokenizer(texts, padding=True, return_tensors="pt")
    mask: Any = told.attention_mask
    read: Any = encoder
    return Words(read(told.input_ids, attention_mask=mask)[0], mask)


@torch.no_grad()
def lessons(
    encoder: T5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    autoencoder: AutoencoderTiny,
    pool: int,
    batch: int,
    seed: int,
    progress: Progress = silent,
) -> Iterator[tuple[Tensor, Words]]:
    """Batches of scaled latents and words without end, from `pool` scenes drawn beforehand.

    The words for a scene are chosen anew each time.
    """
    source = training_scenes(seed)
    scenes = [next(source) for _ in range(pool)]
    parts = []
    for start in range(0, pool, batch):
        parts.append(encoded(autoencoder, scenes[start : start + batch]))
        progress("encode", min(pool, start + batch), pool, 0.0)
    return _lessons(scenes, torch.cat(parts), encoder, tokenizer, batch, seed)


def encoded(autoencoder: AutoencoderTiny, scenes: list[Scene]) -> Tensor:  # -> (B, 4, 12, 12)
    """Scaled latents of scenes."""
    coder: Any = autoencoder
    latents: Tensor = coder.encoder(pictures(scenes)) * coder.config.scaling_factor
    return latents


def pictures(scenes: list[Scene]) -> Tensor:  # -> (B, 3, P, P), from -1 to 1
    """Draw scenes as the autoencoder sees them."""
    images = torch.from_numpy(np.stack([pixels(scene) for scene in scenes]))
    return images.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


def _lessons(
    scenes: list[Scene],
    latents: Tensor,
    encoder: T5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    batch: int,
    seed: int,
) -> Iterator[tuple[Tensor, Words]]:
    generator = np.random.default_rng((seed, 4))
    while True:
        for picks in generator.permutation(len(scenes)).reshape(-1, batch):
            told = [
                "" if generator.random() < _SILENCE else loose_prompt(scenes[i], generator)
                for i in picks
            ]
            with torch.no_grad():
                words = read_words(encoder, tokenizer, told)
            yield latents[torch.from_numpy(picks)], words


class _BoardReader(nn.Module):
    """Nine learnt questions attend to the words; what they find is named, coloured and sized."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = nn.Parameter(torch.randn(BOARD * BOARD, TEXT_WIDTH) / TEXT_WIDTH**0.5)
        self.attention = nn.MultiheadAttention(TEXT_WIDTH, 4, batch_first=True)
        self.heads = nn.Linear(TEXT_WIDTH, sum(BOARD_CLASSES))

    def forward(self, words: Words) -> Tensor:  # -> (B, 9, classes)
        asked = self.questions.expand(len(words.states), -1, -1)
        found, _ = self.attention(asked, words.states, words.states, words.mask == 0)
        answers: Tensor = self.heads(found)
        return answers


def _described(batch: int, seed: int) -> Iterator[tuple[list[str], Tensor]]:
    """Loose prompts, and what is in each cell: (B, 9, 3)."""
    generator = np.random.default_rng((seed, 5))
    source = training_scenes(seed)
    while True:
        scenes = [next(source) for _ in range(batch)]
        texts = [loose_prompt(scene, generator) for scene in scenes]
        yield texts, torch.stack([board(scene) for scene in scenes])


def _crowded(batch: int, seed: int) -> Iterator[Tensor]:
    """Pictures with something in two places of three: most pixels teach."""
    generator = np.random.default_rng((seed, 6))
    number = 1 << 45
    while True:
        scenes = []
        for _ in range(batch):
            things: list[Thing] = []
            while len(things) < BOARD * BOARD:
                things += sample(number).things
                number += 1
            cells = np.flatnonzero(generator.random(BOARD * BOARD) < 2 / 3)
            scenes.append(Scene(tuple(_moved(things[c], int(c)) for c in cells)))
        yield pictures(scenes)


def _moved(thing: Thing, cell: int) -> Thing:
    row, column = divmod(cell, BOARD)
    return Thing(thing.shape, thing.colour, thing.size, row, column, thing.digit, thing.shift)
