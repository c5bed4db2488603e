"""Teach the parts of the text-to-image pipeline, one after the other.

First pictures (the autoencoder), then words (the text encoder, by telling what is at each place),
then drawing (the denoiser, from noise and words; a drafter learns from the target's predictions).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.training.fitting import Course, Fall, chunks, divided, fit, shuffled
from mmspec.zoo.boards import BOARD_CLASSES, arranged, board_loss, boards, crowds, pictures
from mmspec.zoo.prompts import loose_prompt, training_scenes
from mmspec.zoo.scene import BOARD, Scene
from tools.zoo.diffusion.models import TEXT_WIDTH

if TYPE_CHECKING:
    from diffusers import AutoencoderTiny, DDPMScheduler, PixArtTransformer2DModel
    from transformers import PreTrainedTokenizerFast, T5EncoderModel

_DISTURBANCE = 0.1  # noise on latents in training, so that a denoiser may be slightly wrong
_REACH = 1.5  # largest latent that costs nothing
_SILENCE = 0.1  # how often a denoiser is told nothing, for guidance


@dataclass(frozen=True)
class TextStates:
    """What a denoiser is told: `states` (B, L, D) of the text encoder and their mask (B, L)."""

    states: Tensor
    mask: Tensor


def learn_pictures(autoencoder: AutoencoderTiny, steps: int, course: Course) -> None:
    """Train the autoencoder on crowded scenes, its latents slightly disturbed and kept small."""
    coder: Any = autoencoder

    def loss_of(images: Tensor) -> Tensor:
        latents: Tensor = coder.encoder(images)
        seen = latents + _DISTURBANCE * torch.randn_like(latents)
        error: Tensor = coder.decoder(seen) - images
        excess = functional.relu(latents.abs() - _REACH)
        large = 1e-3 * latents.square().mean() + 0.1 * excess.square().mean()
        return error.square().mean() + 0.1 * error.abs().mean() + large

    learnt, shown = list(coder.parameters()), _crowded(8, course.seed)
    fit(learnt, shown, loss_of, Fall(steps, 4e-3), "paint", course)


def learn_words(
    encoder: T5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    course: Course,
) -> None:
    """Train the text encoder until nine questions, one for each place, find their answers."""
    reader = _BoardReader()

    def loss_of(item: tuple[list[str], Tensor]) -> Tensor:
        texts, wanted = item
        return board_loss(reader(read_words(encoder, tokenizer, texts)), wanted)

    matrices, others = divided(encoder.encoder.block, encoder.parameters())
    others = [*others, *reader.parameters()]
    told = _described(64, course.seed)
    fit(others, told, loss_of, Fall(steps, 1.5e-3), "read", course, matrices)


def learn_to_draw(
    denoiser: PixArtTransformer2DModel,
    schedule: DDPMScheduler,
    batches: Iterator[tuple[Tensor, TextStates]],
    fall: Fall,
    course: Course,
    teacher: PixArtTransformer2DModel | None = None,
) -> None:
    """Train a denoiser to predict velocity (Salimans & Ho 2022), or what `teacher` predicts."""

    def loss_of(item: tuple[Tensor, TextStates]) -> Tensor:
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

    model: Any = denoiser
    matrices, others = divided(model.transformer_blocks, model.parameters())
    fit(others, batches, loss_of, fall, "draw", course, matrices)


def predicted(
    denoiser: PixArtTransformer2DModel, noisy: Tensor, times: Tensor, words: TextStates
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
) -> TextStates:
    """Encode prompts, padded to the longest."""
    told = tokenizer(texts, padding=True, return_tensors="pt")
    mask: Any = told.attention_mask
    read: Any = encoder
    return TextStates(read(told.input_ids, attention_mask=mask)[0], mask)


def lessons(
    encoder: T5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    autoencoder: AutoencoderTiny,
    pool: int,
    batch: int,
    course: Course,
) -> Iterator[tuple[Tensor, TextStates]]:
    """Batches of scaled latents and words without end, from `pool` scenes drawn beforehand.

    The words for a scene are chosen anew each time.
    """
    scenes = list(islice(training_scenes(course.seed), pool))
    turns = chunks(scenes, batch, "encode", course.progress)
    with torch.no_grad():
        latents = torch.cat([encoded(autoencoder, part) for part in turns])
    generator = np.random.default_rng((course.seed, 4))

    def drawn() -> Iterator[tuple[Tensor, TextStates]]:
        for picks in shuffled(len(scenes), batch, generator):
            told = [
                "" if generator.random() < _SILENCE else loose_prompt(scenes[i], generator)
                for i in picks
            ]
            with torch.no_grad():
                words = read_words(encoder, tokenizer, told)
            yield latents[torch.from_numpy(picks)], words

    return drawn()


def encoded(autoencoder: AutoencoderTiny, scenes: Sequence[Scene]) -> Tensor:  # -> (B, 4, 12, 12)
    """Scaled latents of scenes."""
    coder: Any = autoencoder
    latents: Tensor = coder.encoder(pictures(scenes)) * coder.config.scaling_factor
    return latents


class _BoardReader(nn.Module):
    """Nine learnt questions attend to the words; what they find is named, coloured and sized."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = nn.Parameter(torch.randn(BOARD * BOARD, TEXT_WIDTH) / TEXT_WIDTH**0.5)
        self.attention = nn.MultiheadAttention(TEXT_WIDTH, 4, batch_first=True)
        self.heads = nn.Linear(TEXT_WIDTH, sum(BOARD_CLASSES))

    def forward(self, words: TextStates) -> Tensor:  # -> (B, 9, classes)
        asked = self.questions.expand(len(words.states), -1, -1)
        found, _ = self.attention(asked, words.states, words.states, words.mask == 0)
        answers: Tensor = self.heads(found)
        return answers


def _described(batch: int, seed: int) -> Iterator[tuple[list[str], Tensor]]:
    """Loose prompts, and what is in each cell: (B, 9, 3)."""
    generator = np.random.default_rng((seed, 5))
    source = training_scenes(seed)
    while True:
        scenes = list(islice(source, batch))
        yield [loose_prompt(scene, generator) for scene in scenes], boards(scenes)


def _crowded(batch: int, seed: int) -> Iterator[Tensor]:
    """Pictures with something in two places of three: most pixels teach."""
    generator = np.random.default_rng((seed, 6))
    crowd = crowds(1 << 45)
    while True:
        cells = [np.flatnonzero(generator.random(BOARD**2) < 2 / 3) for _ in range(batch)]
        yield pictures([arranged(next(crowd), some) for some in cells])
