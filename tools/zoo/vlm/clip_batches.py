"""Training batches of clips: frames or features, with several questions per clip in one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import einops
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.modalities.vlm.formatting import format_chat
from mmspec.training.fitting import CosineDecay, shuffle_batches
from mmspec.zoo.clip_questions import write_clip_text
from mmspec.zoo.language import ExampleKind
from mmspec.zoo.motion import DIRECTIONS, FRAMES, MAX_MOVES, MovingScene, iterate_moving_scenes
from mmspec.zoo.scene import BOARD, COLOURS, SHAPES
from mmspec.zoo.scene_tensors import BOARD_CLASSES, PIXELS, images_to_tensor
from tools.zoo.vlm.batches import IGNORED
from tools.zoo.vlm.processors import QWEN_MERGE, QWEN_PATCH
from tools.zoo.vlm.slot_embeddings import SlotEmbeddings

GRIDS = FRAMES // 2  # moments of a clip, two frames each
SIDE = PIXELS // QWEN_PATCH // QWEN_MERGE  # visual tokens (slots) in a row of a moment
SLOTS = GRIDS * SIDE**2
_WAYS, _PLACES = 1 + len(DIRECTIONS), 1 + BOARD**2
STORY_CLASSES = (*BOARD_CLASSES, _WAYS, _PLACES, _PLACES, 2 + MAX_MOVES, _WAYS)

_NEAR = 0.45  # cells, along each axis


@dataclass(frozen=True)
class TrainingStage:
    """A training stage: decay of the rate, clips per batch, moments per clip, share of captions."""

    decay: CosineDecay
    batch: int
    moments: int
    caption_share: float = 0.2


@dataclass(frozen=True)
class ClipBatch:
    """B clips, each followed by several questions with answers that do not attend to each other.

    features: (B, n, D) of the slots of all or some moments; story: (B, n, 8) labels of the slots,
    see `slot_labels`; ids, groups: (B, L), group 0 is the clip and -1 padding; positions:
    (3, B, L); labels: (B, L), shifted by one, IGNORED outside of answers.
    """

    features: Tensor
    story: Tensor
    ids: Tensor
    positions: Tensor
    groups: Tensor
    labels: Tensor


def render_frames(scene: MovingScene) -> np.ndarray:  # -> (FRAMES, P, P, 3) bytes
    """Render all frames at the input size of the models."""
    return np.stack([np.asarray(frame) for frame in scene.render(PIXELS)])


def clip_inputs(frames: np.ndarray) -> dict[str, Tensor]:  # (B, F, P, P, 3) bytes
    """Return inputs of the vision tower: pairs of frames, patches in the order of Qwen2-VL."""
    count, length = frames.shape[:2]
    shown = images_to_tensor(frames.reshape(-1, *frames.shape[2:]))
    patches = einops.rearrange(
        shown,
        "(b g t) c (h m p) (w n q) -> (b g h w m n) (c t p q)",
        b=count,
        t=2,
        m=QWEN_MERGE,
        n=QWEN_MERGE,
        p=QWEN_PATCH,
        q=QWEN_PATCH,
    )
    side = PIXELS // QWEN_PATCH
    grids = torch.tensor([[length // 2, side, side]] * count)
    return {"pixel_values_videos": patches, "video_grid_thw": grids}


def clip_features(model: Any, frames: np.ndarray) -> Tensor:  # (B, F, P, P, 3) -> (B, slots, D)
    """Return the video features of clips, the inputs of the text model."""
    features = model.get_video_features(**clip_inputs(frames), return_dict=True).pooler_output
    return torch.stack(tuple(features))


def slot_labels(scene: MovingScene) -> Tensor:  # -> (SLOTS, 8)
    """Return the labels of each slot.

    They are name, colour, size, current direction and current place of its thing, then its initial
    place, the index of its move so far, and the direction of that move.
    A thing occupies the slots whose middles are near its own. 0 means no thing, no direction, or no
    move so far.
    """
    found = np.zeros((GRIDS, SIDE, SIDE, len(STORY_CLASSES)), dtype=np.int64)
    middles = (np.arange(SIDE) + 0.5) * BOARD / SIDE
    frames = [scene.scene_at(frame).things for frame in range(FRAMES)]
    for i, thing in enumerate(scene.things):
        name = SHAPES.index(thing.shape) if thing.digit is None else len(SHAPES) + thing.digit
        appearance = (1 + name, 1 + COLOURS.index(thing.colour), 1 + (thing.size == "large"))
        order = next((k for k, one in enumerate(scene.moves, 1) if one.thing == i), 0)
        move = scene.find_move(i)
        for grid in range(GRIDS):
            pair = [frames[2 * grid + late][i] for late in range(2)]
            x = 0.5 + np.mean([one.column + one.shift[0] for one in pair])
            y = 0.5 + np.mean([one.row + one.shift[1] for one in pair])
            has_begun = move is not None and move.first <= 2 * grid
            moved = 1 + DIRECTIONS.index(move.direction) if move is not None and has_begun else 0
            goes = move is not None and move.first < 2 * grid + 1 <= move.last
            here = BOARD * int(y) + int(x)
            origin = BOARD * thing.row + thing.column
            across, down = (abs(middles - at) < _NEAR for at in (x, y))
            story = (moved * goes, 1 + here, 1 + origin, 1 + order * has_begun, moved)
            found[grid, down[:, None] & across] = (*appearance, *story)
    return torch.from_numpy(found).flatten(0, 2)


class ClipBatcher:
    """Makes batches of clips without end, with a fixed number of questions per clip."""

    def __init__(self, model: Any, processor: Any, questions: int) -> None:
        self.tokenizer, self.questions = processor.tokenizer, questions
        before, self.after = format_chat(processor, "@", ["video"]).split("@")
        pad = processor.video_token
        self.opening = self.tokenizer(before.replace(pad, pad * SLOTS)).input_ids
        ids = torch.tensor([self.opening])
        types = 2 * (ids == model.config.video_token_id).int()
        side = PIXELS // QWEN_PATCH
        self.places, _ = model.model.get_rope_index(
            ids,
            types,
            video_grid_thw=torch.tensor([[GRIDS, side, side]]),
            second_per_grid_ts=torch.tensor([1.0]),
        )  # (3, 1, opening)
        self.first = self.opening.index(model.config.video_token_id)
        self.next = int(self.places[:, 0, -1].max()) + 1

    def iterate_synthetic(
        self, embeddings: SlotEmbeddings, stage: TrainingStage, seed: int
    ) -> Iterator[ClipBatch]:
        """Iterate over clips without images: features are the embeddings of slot labels."""
        generator, scenes = np.random.default_rng((seed, 17)), iterate_moving_scenes("train", seed)
        while True:
            clips = [scene for scene, _ in islice(scenes, stage.batch)]
            story = torch.stack([slot_labels(scene) for scene in clips])
            rows = [self._sample_questions(scene, stage, generator) for scene in clips]
            moments = torch.stack(
                [sample_moments(scene, stage.moments, generator) for scene in clips]
            )
            yield self._pack_batch(embeddings.embed(story), story, rows, moments)

    def iterate_rendered(
        self,
        clips: Sequence[MovingScene],
        features: Tensor,
        stage: TrainingStage,
        seed: int,
        answers: Sequence[Sequence[tuple[str, str]]] | None = None,
    ) -> Iterator[ClipBatch]:
        """Iterate over clips with features (N, SLOTS, D) of a vision tower.

        `answers` replaces the reference answers: (prompt, answer) pairs of each clip.
        """
        generator = np.random.default_rng((seed, 17))
        for picked in shuffle_batches(
            len(clips) // stage.batch * stage.batch, stage.batch, generator
        ):
            story = torch.stack([slot_labels(clips[i]) for i in picked])
            if answers is None:
                rows = [self._sample_questions(clips[i], stage, generator) for i in picked]
            else:
                rows = [self._choose_questions(answers[i], generator) for i in picked]
            moments = torch.stack(
                [sample_moments(clips[i], stage.moments, generator) for i in picked]
            )
            yield self._pack_batch(features[picked].float(), story, rows, moments)

    def _sample_questions(
        self, scene: MovingScene, stage: TrainingStage, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        kinds: list[ExampleKind] = [
            "caption" if generator.random() < stage.caption_share else "question"
            for _ in range(self.questions)
        ]
        return [
            write_clip_text(scene, int(generator.integers(1 << 40)), kind)[:2] for kind in kinds
        ]

    def _choose_questions(
        self, given: Sequence[tuple[str, str]], generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        return [given[k] for k in generator.permutation(len(given))[: self.questions]]

    def _pack_batch(
        self, features: Tensor, story: Tensor, rows: list[list[tuple[str, str]]], moments: Tensor
    ) -> ClipBatch:
        slots = (moments[:, :, None] * SIDE**2 + torch.arange(SIDE**2)).flatten(1)  # (B, n)
        opening, end = torch.tensor(self.opening), self.tokenizer.eos_token_id
        before, after = range(self.first), range(self.first + SLOTS, len(self.opening))
        ids, groups, labels, places = [], [], [], []
        for row, visible in zip(rows, slots.tolist(), strict=True):
            read = [*before, *(self.first + slot for slot in visible), *after]
            line, group, label = opening[read].tolist(), [0] * len(read), [IGNORED] * len(read)
            place = [self.places[:, 0, read]]
            for number, (prompt, answer) in enumerate(row, 1):
                question = self.tokenizer(prompt + self.after).input_ids
                response = [*self.tokenizer(answer).input_ids, end]
                line += [*question, *response[:-1]]
                group += [number] * (len(question) + len(response) - 1)
                label += [IGNORED] * (len(question) - 1) + response
                span = self.next + torch.arange(len(question) + len(response) - 1)
                place.append(span.expand(3, -1))
            ids.append(torch.tensor(line))
            groups.append(torch.tensor(group))
            labels.append(torch.tensor(label))
            places.append(torch.cat(place, 1).T)
        return ClipBatch(
            features.take_along_dim(slots[..., None], 1),
            story.take_along_dim(slots[..., None], 1),
            pad_sequence(ids, True, self.tokenizer.pad_token_id),
            pad_sequence(places, True, 0).permute(2, 0, 1),
            pad_sequence(groups, True, -1),
            pad_sequence(labels, True, IGNORED),
        )


def sample_moments(scene: MovingScene, count: int, generator: np.random.Generator) -> Tensor:
    """Sample `count` moments in order: the first, the last, one of each move, and others.

    They suffice to answer all questions, and shorten the sequence.
    """
    needed = {0, GRIDS - 1}
    needed |= {int(generator.integers(m.first + 1, m.last + 1)) // 2 for m in scene.moves}
    others = [moment for moment in range(GRIDS) if moment not in needed]
    moments = [*needed, *generator.permutation(others)[: count - len(needed)]]
    return torch.tensor(sorted(map(int, moments)))


def clip_states(model: Any, item: ClipBatch) -> Tensor:  # -> (n, D)
    """Return the last hidden states that predict the tokens of answers, row by row."""
    return clip_layers(model, item)[-1][item.labels != IGNORED]


def clip_layers(model: Any, item: ClipBatch) -> tuple[Tensor, ...]:  # each (B, L, D)
    """Return the input of the first layer of the text model, and the output of each layer."""
    embeds = model.get_input_embeddings()(item.ids)
    marks = (item.ids == model.config.video_token_id)[..., None]
    embeds = embeds.masked_scatter(marks, item.features.to(embeds))
    here, there = item.groups[:, :, None], item.groups[:, None, :]
    length = item.ids.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    seen = earlier & ((there == 0) | (there == here))
    out: tuple[Tensor, ...] = model.model.language_model(
        inputs_embeds=embeds,
        attention_mask=seen[:, None],
        position_ids=item.positions,
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    return out
