"""Teach the language part of Janus: first to look up what is where, then to draw it in codes."""

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

from mmspec.training.fitting import Course, Fall, chunks, divided, fit
from mmspec.zoo.boards import BOARD_CLASSES, board_loss, boards
from mmspec.zoo.prompts import loose_prompt, training_scenes
from mmspec.zoo.scene import BOARD, Scene, tiled
from tools.zoo.image.coding import coded, pictures, scattered, taken
from tools.zoo.image.models import CODES, SIDE

_MOST = 6  # things in a scene to learn drawing from
_NUMBERS = 1 << 47  # scenes come from seeds of their own
_AT_ONCE = 64  # pictures
_CALLED_FOR = 3.0  # how much codes count where something stands: of others little can be known
_SILENCE = 0.1  # how often a prompt says nothing, for guidance


@dataclass(frozen=True)
class Prompts:
    """Ids (B, L) of prompts, padded on the right; `lengths` (B,) with begin-of-image."""

    ids: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class CodeLesson:
    """Prompts, the codes (B, 81) of pictures of what they say, and how much each code counts."""

    prompts: Prompts
    codes: Tensor
    weights: Tensor  # as codes


class PromptEncoder:
    """Makes the ids of prompts as `JanusProcessor` does for drawing."""

    def __init__(self, words: Any) -> None:
        self.words = words
        self.begin = words.convert_tokens_to_ids(words.boi_token)

    def __call__(self, texts: Sequence[str], silent: Sequence[bool] | None = None) -> Prompts:
        """Encode texts; where `silent`, all that they say is padding, as it is for guidance."""
        rows: list[list[int]] = self.words([t + self.words.boi_token for t in texts]).input_ids
        ids = torch.full((len(rows), max(map(len, rows))), self.words.pad_token_id)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
        if silent is not None:
            said = (ids != self.words.bos_token_id) & (ids != self.begin)
            ids = ids.masked_fill(said & torch.tensor(silent)[:, None], self.words.pad_token_id)
        return Prompts(ids, torch.tensor([len(row) for row in rows]))


def learn_to_read(
    model: Any, reader: PromptEncoder, steps: int, course: Course, batch: int = 64
) -> None:
    """Train the language model to know, from a prompt and a position, what is at that place.

    Behind the prompt come nine codes that say nothing, each as far from the begin of the picture
    as a code of its place is. This is the part of drawing that takes longest to learn, in
    sequences of a third of the length.
    """
    heads = nn.Linear(model.config.text_config.hidden_size, sum(BOARD_CLASSES))

    def loss_of(item: tuple[Prompts, Tensor, Tensor]) -> Tensor:
        prompts, offsets, wanted = item
        return board_loss(heads(looked_up(model, prompts, offsets)), wanted)

    matrices, others = drawing_weights(model)
    others = [*others, *heads.parameters()]
    told = _described(reader, batch, course.seed)
    fit(others, told, loss_of, Fall(steps, 1.5e-3), "read", course, matrices)


def learn_to_draw(model: Any, lessons: Iterator[CodeLesson], fall: Fall, course: Course) -> None:
    """Train the language model on the codes of pictures, given prompts."""

    def loss_of(lesson: CodeLesson) -> Tensor:
        logits = logits_of(model, lesson.prompts, lesson.codes).flatten(0, 1)
        missed = functional.cross_entropy(logits, lesson.codes.flatten(), reduction="none")
        return (missed * lesson.weights.flatten()).sum() / lesson.weights.sum()

    matrices, others = drawing_weights(model)
    fit(others, lessons, loss_of, fall, "draw", course, matrices)


def logits_of(model: Any, prompts: Prompts, drawn: Tensor) -> Tensor:  # (B, 81) -> (B, 81, K)
    """The logits of every code, given the prompt and the codes before it."""
    logits: Tensor = model.model.generation_head(states_of(model, prompts, drawn))
    return logits


def states_of(model: Any, prompts: Prompts, drawn: Tensor) -> Tensor:  # (B, 81) -> (B, 81, D)
    """The last hidden states, from begin-of-image to the last code but one."""
    words = model.get_input_embeddings()(prompts.ids)
    before = model.prepare_embeddings_for_image_generation(drawn[:, :-1])
    length = words.shape[1]
    spot = torch.arange(length + before.shape[1])
    late = spot - prompts.lengths[:, None]  # which code stands there: padding goes to the end
    source = torch.where(late < 0, spot, length + late.clamp(max=before.shape[1] - 1))
    both = torch.cat([words, before], 1)
    inputs = both.gather(1, source[..., None].expand(-1, -1, both.shape[-1]))
    states = model.model.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    wanted = prompts.lengths[:, None] - 1 + torch.arange(drawn.shape[1])
    found: Tensor = states.gather(1, wanted[..., None].expand(-1, -1, states.shape[-1]))
    return found


def looked_up(model: Any, prompts: Prompts, offsets: Tensor) -> Tensor:  # (B, Q) -> (B, Q, D)
    """Hidden states at positions `offsets` behind begin-of-image, where codes say nothing."""
    words = model.get_input_embeddings()(prompts.ids)
    blank = model.prepare_embeddings_for_image_generation(torch.randint(CODES, offsets.shape))
    length, count = words.shape[1], offsets.shape[1]
    spot = torch.arange(length)
    positions = torch.cat(
        [spot.expand(len(words), -1), prompts.lengths[:, None] - 1 + offsets], dim=1
    )
    is_read = torch.ones(length + count, length + count, dtype=torch.bool).tril()
    is_padding = functional.pad(spot >= prompts.lengths[:, None], (0, count))
    is_read = is_read & ~is_padding[:, None] | torch.eye(length + count, dtype=torch.bool)
    states: Tensor = model.model.language_model(
        inputs_embeds=torch.cat([words, blank], 1),
        attention_mask=is_read[:, None],
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state
    return states[:, length:]


def drawing_weights(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weight matrices of the decoder layers, and all else that draws."""
    language, parts = model.model.language_model, model.model
    drawing = (
        *(language.embed_tokens, language.norm, language.layers),
        *(parts.generation_embeddings, parts.generation_aligner, parts.generation_head),
    )
    return divided(language.layers, [p for part in drawing for p in part.parameters()])


def busy_scenes(seed: int, most: int = _MOST) -> Iterator[Scene]:
    """Training scenes with one to `most` things, each number as often: more than prompts teach."""
    generator = np.random.default_rng((seed, 12))
    for scene in scattered(_NUMBERS + (seed << 24), generator, most):
        if scene.split == "train":
            yield scene


def encoded_pool(coder: Any, pool: int, course: Course) -> tuple[list[Scene], Tensor]:
    """Busy scenes on tiles, and the codes (pool, 81) of their pictures."""
    generator = np.random.default_rng((course.seed, 17))
    scenes = [tiled(scene, generator) for scene in islice(busy_scenes(course.seed), pool)]
    return scenes, encoded(coder, scenes, course)


def encoded(coder: Any, scenes: Sequence[Scene], course: Course) -> Tensor:
    """The codes (n, 81) of pictures of scenes."""
    turns = chunks(scenes, _AT_ONCE, "encode", course.progress)
    return torch.cat([coded(coder, pictures(part)) for part in turns])


def lessons(
    scenes: Sequence[Scene], drawn: Tensor, reader: PromptEncoder, batch: int, seed: int
) -> Iterator[CodeLesson]:
    """Batches without end, each of scenes with as many things; the words are chosen anew."""
    generator = np.random.default_rng((seed, 8))
    weights = 1 + (_CALLED_FOR - 1) * taken(scenes, math.isqrt(drawn.shape[1]))
    counts = np.array([len(scene.things) for scene in scenes])
    while True:
        order = generator.permutation(len(scenes))
        order = order[np.argsort(counts[order], kind="stable")]
        for picks in generator.permutation(order.reshape(-1, batch)):
            told = [loose_prompt(scenes[i], generator) for i in picks]
            silent = generator.random(len(picks)) < _SILENCE
            rows = torch.from_numpy(picks)
            yield CodeLesson(reader(told, silent.tolist()), drawn[rows], weights[rows])


def _described(
    reader: PromptEncoder, batch: int, seed: int
) -> Iterator[tuple[Prompts, Tensor, Tensor]]:
    """Prompts, an offset (B, 9) in each place, and what is there (B, 9, 3)."""
    generator = np.random.default_rng((seed, 9))
    source = training_scenes(seed)
    across = SIDE // BOARD
    corner = torch.arange(SIDE**2).view(SIDE, SIDE)[::across, ::across].flatten()
    while True:
        scenes = list(islice(source, batch))
        prompts = reader([loose_prompt(scene, generator) for scene in scenes])
        within = torch.from_numpy(generator.integers(across, size=(2, batch, BOARD**2)))
        yield prompts, corner + SIDE * within[0] + within[1], boards(scenes)
