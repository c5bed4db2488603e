"""Train the language model of Janus: first to look up the contents of cells, then to generate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.training.fitting import CosineDecay, TrainingRun, fit, iterate_chunks, split_parameters
from mmspec.zoo.prompts import iterate_training_scenes, write_varied_prompt
from mmspec.zoo.scene import BOARD, Scene, add_tiles
from mmspec.zoo.scene_tensors import BOARD_CLASSES, board_loss, encode_boards
from tools.zoo.image.coding import encode_images, occupied_codes, render_images, sample_scenes
from tools.zoo.image.models import CODES, SIDE

_MAX_THINGS = 6  # in a training scene
_NUMBERS = 1 << 47  # first scene seed, different for every stage
_AT_ONCE = 64  # images per batch of encoding
_OBJECT_WEIGHT = 3.0  # loss weight of codes of objects; backgrounds are hardly predictable
_DROPOUT = 0.1  # share of empty prompts, for guidance


@dataclass(frozen=True)
class Prompts:
    """Ids (B, L) of prompts, padded on the right; `lengths` (B,) with begin-of-image."""

    ids: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class CodeExample:
    """Prompts, the codes (B, 81) of their images, and loss weights of the codes."""

    prompts: Prompts
    codes: Tensor
    weights: Tensor  # as codes


class PromptEncoder:
    """Encodes prompts as `JanusProcessor` does for image generation."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.begin = tokenizer.convert_tokens_to_ids(tokenizer.boi_token)

    def __call__(self, texts: Sequence[str], is_empty: Sequence[bool] | None = None) -> Prompts:
        """Encode texts; `silent` ones are padded over, as unconditional prompts are."""
        rows: list[list[int]] = self.tokenizer(
            [t + self.tokenizer.boi_token for t in texts]
        ).input_ids
        ids = torch.full((len(rows), max(map(len, rows))), self.tokenizer.pad_token_id)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        if is_empty is not None:
            is_text = (ids != self.tokenizer.bos_token_id) & (ids != self.begin)
            ids = ids.masked_fill(
                is_text & torch.tensor(is_empty)[:, None], self.tokenizer.pad_token_id
            )
        return Prompts(ids, torch.tensor([len(row) for row in rows]))


def train_lookup(
    model: Any, reader: PromptEncoder, steps: int, run: TrainingRun, batch: int = 64
) -> None:
    """Train the language model to predict the contents of a cell from a prompt and a position.

    The prompt is followed by nine random codes with the positions of codes of the nine cells. This
    is the slowest part of learning to generate, here in sequences of a third of the length.
    """
    heads = nn.Linear(model.config.text_config.hidden_size, sum(BOARD_CLASSES))

    def loss_of(item: tuple[Prompts, Tensor, Tensor]) -> Tensor:
        prompts, offsets, labels = item
        return board_loss(heads(lookup_states(model, prompts, offsets)), labels)

    matrices, others = generation_parameters(model)
    others = [*others, *heads.parameters()]
    texts = _lookup_batches(reader, batch, run.seed)
    fit(others, texts, loss_of, CosineDecay(steps, 1.5e-3), "read", run, matrices)


def train_generation(
    model: Any, examples: Iterator[CodeExample], decay: CosineDecay, run: TrainingRun
) -> None:
    """Train the language model on codes of images, given prompts."""

    def loss_of(example: CodeExample) -> Tensor:
        logits = logits_of(model, example.prompts, example.codes).flatten(0, 1)
        error = functional.cross_entropy(logits, example.codes.flatten(), reduction="none")
        return (error * example.weights.flatten()).sum() / example.weights.sum()

    matrices, others = generation_parameters(model)
    fit(others, examples, loss_of, decay, "draw", run, matrices)


def logits_of(model: Any, prompts: Prompts, codes: Tensor) -> Tensor:  # (B, 81) -> (B, 81, K)
    """The logits of every code, given the prompt and the codes before it."""
    logits: Tensor = model.model.generation_head(states_of(model, prompts, codes))
    return logits


def states_of(model: Any, prompts: Prompts, codes: Tensor) -> Tensor:  # (B, 81) -> (B, 81, D)
    """The last hidden states from begin-of-image to the second-last code."""
    embeds = model.get_input_embeddings()(prompts.ids)
    before = model.prepare_embeddings_for_image_generation(codes[:, :-1])
    length = embeds.shape[1]
    position = torch.arange(length + before.shape[1])
    code_index = position - prompts.lengths[:, None]  # index of the code; padding goes to the end
    source = torch.where(
        code_index < 0, position, length + code_index.clamp(max=before.shape[1] - 1)
    )
    both = torch.cat([embeds, before], 1)
    inputs = both.gather(1, source[..., None].expand(-1, -1, both.shape[-1]))
    states = model.model.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    positions = prompts.lengths[:, None] - 1 + torch.arange(codes.shape[1])
    found: Tensor = states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
    return found


def lookup_states(model: Any, prompts: Prompts, offsets: Tensor) -> Tensor:  # (B, Q) -> (B, Q, D)
    """Hidden states at positions `offsets` after begin-of-image, with random codes as inputs."""
    embeds = model.get_input_embeddings()(prompts.ids)
    blank = model.prepare_embeddings_for_image_generation(torch.randint(CODES, offsets.shape))
    length, count = embeds.shape[1], offsets.shape[1]
    position = torch.arange(length)
    positions = torch.cat(
        [position.expand(len(embeds), -1), prompts.lengths[:, None] - 1 + offsets], dim=1
    )
    is_read = torch.ones(length + count, length + count, dtype=torch.bool).tril()
    is_padding = functional.pad(position >= prompts.lengths[:, None], (0, count))
    is_read = is_read & ~is_padding[:, None] | torch.eye(length + count, dtype=torch.bool)
    states: Tensor = model.model.language_model(
        inputs_embeds=torch.cat([embeds, blank], 1),
        attention_mask=is_read[:, None],
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state
    return states[:, length:]


def generation_parameters(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Weight matrices of the decoder layers, and all other parameters used for generation."""
    language, parts = model.model.language_model, model.model
    drawing = (
        *(language.embed_tokens, language.norm, language.layers),
        *(parts.generation_embeddings, parts.generation_aligner, parts.generation_head),
    )
    return split_parameters(language.layers, [p for part in drawing for p in part.parameters()])


def sample_training_scenes(seed: int, max_things: int = _MAX_THINGS) -> Iterator[Scene]:
    """Training scenes with one to `max_things` things, counts uniform."""
    generator = np.random.default_rng((seed, 12))
    for scene in sample_scenes(_NUMBERS + (seed << 24), generator, max_things):
        if scene.split == "train":
            yield scene


def encode_pool(coder: Any, pool: int, run: TrainingRun) -> tuple[list[Scene], Tensor]:
    """Tiled training scenes, and the codes (pool, 81) of their images."""
    generator = np.random.default_rng((run.seed, 17))
    scenes = [
        add_tiles(scene, generator) for scene in islice(sample_training_scenes(run.seed), pool)
    ]
    return scenes, encode_scenes(coder, scenes, run)


def encode_scenes(coder: Any, scenes: Sequence[Scene], run: TrainingRun) -> Tensor:
    """The codes (n, 81) of images of scenes."""
    chunks = iterate_chunks(scenes, _AT_ONCE, "encode", run.progress)
    return torch.cat([encode_images(coder, render_images(part)) for part in chunks])


def example_batches(
    scenes: Sequence[Scene], codes: Tensor, reader: PromptEncoder, batch: int, seed: int
) -> Iterator[CodeExample]:
    """Infinite batches of scenes with equal counts of things, with a new prompt in every epoch."""
    generator = np.random.default_rng((seed, 8))
    weights = 1 + (_OBJECT_WEIGHT - 1) * occupied_codes(scenes, math.isqrt(codes.shape[1]))
    counts = np.array([len(scene.things) for scene in scenes])
    while True:
        order = generator.permutation(len(scenes))
        order = order[np.argsort(counts[order], kind="stable")]
        for picks in generator.permutation(order.reshape(-1, batch)):
            texts = [write_varied_prompt(scenes[i], generator) for i in picks]
            is_empty = generator.random(len(picks)) < _DROPOUT
            rows = torch.from_numpy(picks)
            yield CodeExample(reader(texts, is_empty.tolist()), codes[rows], weights[rows])


def _lookup_batches(
    reader: PromptEncoder, batch: int, seed: int
) -> Iterator[tuple[Prompts, Tensor, Tensor]]:
    """Prompts, a code offset (B, 9) in each cell, and the contents of the cells (B, 9, 3)."""
    generator = np.random.default_rng((seed, 9))
    source = iterate_training_scenes(seed)
    across = SIDE // BOARD
    corner = torch.arange(SIDE**2).view(SIDE, SIDE)[::across, ::across].flatten()
    while True:
        scenes = list(islice(source, batch))
        prompts = reader([write_varied_prompt(scene, generator) for scene in scenes])
        within = torch.from_numpy(generator.integers(across, size=(2, batch, BOARD**2)))
        yield prompts, corner + SIDE * within[0] + within[1], encode_boards(scenes)
