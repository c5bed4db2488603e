"""What a model of clips learns from: frames, and several questions behind each clip at once."""

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

from mmspec.modalities.vlm.formatting import chat
from mmspec.training.fitting import Fall, shuffled
from mmspec.zoo.boards import BOARD_CLASSES, PIXELS, as_pictures
from mmspec.zoo.happenings import tell
from mmspec.zoo.language import ExampleKind
from mmspec.zoo.moving import DIRECTIONS, FRAMES, MOST_MOVES, MovingScene, endless_scenes
from mmspec.zoo.scene import BOARD, COLOURS, SHAPES
from tools.zoo.vlm.batches import IGNORED
from tools.zoo.vlm.processors import QWEN_MERGE, QWEN_PATCH
from tools.zoo.vlm.slot_words import SlotWords

GRIDS = FRAMES // 2  # moments that the model sees, two frames each
SIDE = PIXELS // QWEN_PATCH // QWEN_MERGE  # slots in a row of a moment
SLOTS = GRIDS * SIDE**2
_WAYS, _PLACES = 1 + len(DIRECTIONS), 1 + BOARD**2
STORY_CLASSES = (*BOARD_CLASSES, _WAYS, _PLACES, _PLACES, 2 + MOST_MOVES, _WAYS)

_NEAR = 0.45  # cells, along each axis


@dataclass(frozen=True)
class Telling:
    """Lessons of the text model: clips in a batch, moments of each, and how many ask to caption."""

    fall: Fall
    batch: int
    moments: int
    captions: float = 0.2


@dataclass(frozen=True)
class ClipBatch:
    """B clips, and behind each several questions with their answers, which do not see each other.

    features: (B, n, D) what slots show, of all moments or some; story: (B, n, 8) as `sights` has
    it; ids, groups: (B, L), group 0 is the clip and -1 padding; positions: (3, B, L); labels:
    (B, L) of what comes next, IGNORED outside of answers.
    """

    features: Tensor
    story: Tensor
    ids: Tensor
    positions: Tensor
    groups: Tensor
    labels: Tensor


def frames_of(scene: MovingScene) -> np.ndarray:  # -> (FRAMES, P, P, 3) bytes
    """All frames at the size that models read."""
    return np.stack([np.asarray(frame) for frame in scene.render(PIXELS)])


def clip_inputs(frames: np.ndarray) -> dict[str, Tensor]:  # (B, F, P, P, 3) bytes
    """What the vision tower reads: pairs of frames, patches in the order of Qwen2-VL."""
    count, length = frames.shape[:2]
    shown = as_pictures(frames.reshape(-1, *frames.shape[2:]))
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
    """What the text model is shown of clips."""
    seen = model.get_video_features(**clip_inputs(frames), return_dict=True).pooler_output
    return torch.stack(tuple(seen))


def sights(scene: MovingScene) -> Tensor:  # -> (SLOTS, 8)
    """Whose slot each is: name, colour, size, which way it goes, where it is; where it was at
    first, as which in order it moves or has moved, and which way.

    A thing has the slots whose middles are near its own. Elsewhere all is 0, which is nothing; also
    no direction, and no move so far.
    """
    found = np.zeros((GRIDS, SIDE, SIDE, len(STORY_CLASSES)), dtype=np.int64)
    middles = (np.arange(SIDE) + 0.5) * BOARD / SIDE
    frames = [scene.at(frame).things for frame in range(FRAMES)]
    for i, thing in enumerate(scene.things):
        name = SHAPES.index(thing.shape) if thing.digit is None else len(SHAPES) + thing.digit
        looks = (1 + name, 1 + COLOURS.index(thing.colour), 1 + (thing.size == "large"))
        order = next((k for k, one in enumerate(scene.moves, 1) if one.thing == i), 0)
        move = scene.mover(i)
        for grid in range(GRIDS):
            pair = [frames[2 * grid + late][i] for late in range(2)]
            x = 0.5 + np.mean([one.column + one.shift[0] for one in pair])
            y = 0.5 + np.mean([one.row + one.shift[1] for one in pair])
            begun = move is not None and move.first <= 2 * grid
            moved = 1 + DIRECTIONS.index(move.direction) if move is not None and begun else 0
            goes = move is not None and move.first < 2 * grid + 1 <= move.last
            here = BOARD * int(y) + int(x)
            origin = BOARD * thing.row + thing.column
            across, down = (abs(middles - at) < _NEAR for at in (x, y))
            story = (moved * goes, 1 + here, 1 + origin, 1 + order * begun, moved)
            found[grid, down[:, None] & across] = (*looks, *story)
    return torch.from_numpy(found).flatten(0, 2)


class ClipTeacher:
    """Makes batches of clips without end, with so many questions to each."""

    def __init__(self, model: Any, processor: Any, questions: int) -> None:
        self.tokenizer, self.questions = processor.tokenizer, questions
        before, self.after = chat(processor, "@", ["video"]).split("@")
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

    def told(self, words: SlotWords, how: Telling, seed: int) -> Iterator[ClipBatch]:
        """Clips that nobody has drawn: slots show in words what a tower is to show of them."""
        generator, scenes = np.random.default_rng((seed, 17)), endless_scenes("train", seed)
        while True:
            clips = [scene for scene, _ in islice(scenes, how.batch)]
            story = torch.stack([sights(scene) for scene in clips])
            rows = [self._asked(scene, how, generator) for scene in clips]
            kept = torch.stack([some_moments(scene, how.moments, generator) for scene in clips])
            yield self._packed(words.shown(story), story, rows, kept)

    def seen(
        self,
        clips: Sequence[MovingScene],
        features: Tensor,
        how: Telling,
        seed: int,
        said: Sequence[Sequence[tuple[str, str]]] | None = None,
    ) -> Iterator[ClipBatch]:
        """Clips of which a tower shows `features` (N, SLOTS, D).

        `said` replaces the right answers by those of a model: (prompt, answer) pairs of each clip.
        """
        generator = np.random.default_rng((seed, 17))
        for picked in shuffled(len(clips) // how.batch * how.batch, how.batch, generator):
            story = torch.stack([sights(clips[i]) for i in picked])
            if said is None:
                rows = [self._asked(clips[i], how, generator) for i in picked]
            else:
                rows = [self._some(said[i], generator) for i in picked]
            kept = torch.stack([some_moments(clips[i], how.moments, generator) for i in picked])
            yield self._packed(features[picked].float(), story, rows, kept)

    def _asked(
        self, scene: MovingScene, how: Telling, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        kinds: list[ExampleKind] = [
            "caption" if generator.random() < how.captions else "question"
            for _ in range(self.questions)
        ]
        return [tell(scene, int(generator.integers(1 << 40)), kind)[:2] for kind in kinds]

    def _some(
        self, given: Sequence[tuple[str, str]], generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        return [given[k] for k in generator.permutation(len(given))[: self.questions]]

    def _packed(
        self, features: Tensor, story: Tensor, rows: list[list[tuple[str, str]]], kept: Tensor
    ) -> ClipBatch:
        slots = (kept[:, :, None] * SIDE**2 + torch.arange(SIDE**2)).flatten(1)  # (B, n)
        opening, end = torch.tensor(self.opening), self.tokenizer.eos_token_id
        before, behind = range(self.first), range(self.first + SLOTS, len(self.opening))
        ids, groups, labels, places = [], [], [], []
        for row, shown in zip(rows, slots.tolist(), strict=True):
            read = [*before, *(self.first + slot for slot in shown), *behind]
            line, group, label = opening[read].tolist(), [0] * len(read), [IGNORED] * len(read)
            place = [self.places[:, 0, read]]
            for number, (prompt, answer) in enumerate(row, 1):
                asked = self.tokenizer(prompt + self.after).input_ids
                told = [*self.tokenizer(answer).input_ids, end]
                line += [*asked, *told[:-1]]
                group += [number] * (len(asked) + len(told) - 1)
                label += [IGNORED] * (len(asked) - 1) + told
                span = self.next + torch.arange(len(asked) + len(told) - 1)
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


def some_moments(scene: MovingScene, count: int, generator: np.random.Generator) -> Tensor:
    """So many moments of a clip, in order: the first, the last, one of each move, and others.

    What is asked of the clip can be told from them, in lessons that are shorter by all the rest.
    """
    needed = {0, GRIDS - 1}
    needed |= {int(generator.integers(m.first + 1, m.last + 1)) // 2 for m in scene.moves}
    others = [moment for moment in range(GRIDS) if moment not in needed]
    kept = [*needed, *generator.permutation(others)[: count - len(needed)]]
    return torch.tensor(sorted(map(int, kept)))


def clip_states(model: Any, item: ClipBatch) -> Tensor:  # -> (n, D)
    """Last hidden states of what leads to each token of an answer, row by row."""
    return clip_layers(model, item)[-1][item.labels != IGNORED]


def clip_layers(model: Any, item: ClipBatch) -> tuple[Tensor, ...]:  # each (B, L, D)
    """What goes into the first layer of the text model, and what comes out of each."""
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
