"""Train the checkpoints that answer questions about clips, and draft such answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.modalities.vlm import clips as films
from mmspec.modalities.vlm.checkpoints import load
from mmspec.modalities.vlm.formatting import chat
from mmspec.modality import Entry
from mmspec.training.fitting import Course, Fall, chunks, divided, fit
from mmspec.training.reporting import Report
from mmspec.zoo.boards import pixels
from mmspec.zoo.happenings import ClipExample, clip_examples, score_clip, score_motion, tell
from mmspec.zoo.moving import FRAMES, MovingScene, endless_scenes, moving_scenes
from mmspec.zoo.training import kept, teacher
from tools.zoo.expansion import expand
from tools.zoo.mimetic_init import begin_with_likeness
from tools.zoo.vlm.architecture import CLIP_TARGET, SIGHTED, LanguageShape, clip_qwen
from tools.zoo.vlm.batches import IGNORED
from tools.zoo.vlm.clip_lessons import (
    GRIDS,
    SLOTS,
    STORY_CLASSES,
    ClipBatch,
    ClipTeacher,
    Telling,
    clip_features,
    clip_layers,
    frames_of,
    sights,
)
from tools.zoo.vlm.evaluate import acceptance_length
from tools.zoo.vlm.processors import clip_processor
from tools.zoo.vlm.slot_words import SlotWords
from tools.zoo.vlm.train import save

ABOUT = """\
Knows only moving scenes of the `mmspec` zoo: things of the Scene world that go from place to place
on paper, one after the other, in a clip of 32 frames, two a second.

A target's tower learned from drawn frames to show in words what is there and which way it goes, and
its text model, a shallow one, to answer from such words; then from what the tower shows, with
layers grown between its own. A drafter learned from what its target says. The target was made in
several goes, one stage of the plan after the other, the tower beside the text model.
"""
NOTES = """\
`facts` is the share of facts right in what it says greedily of held-out clips: what moves, which
way and where to, in which order, what stays, and where all is at first and at last; `motion facts`
leaves the last two out. What is made up is wrong. `acceptance length` is tokens per round of greedy
chain speculation with five drafted tokens, on held-out clips. All are measured on the float16
weights, run in float32.
"""
HELD_OUT = 100
MAX_NEW_TOKENS = 160
FIRST = 6  # layers of the text model that learn first
WATCHING = Fall(3000, 1.5e-3)
SEEN = 48  # moments of clips in a batch of the tower
POOL, QUESTIONS = 5000, 6  # clips that the tower looks at, and questions to each
SPOKEN, TOLD, ASKED = 400, 3, 16  # clips that a drafter hears of, questions to each, in a batch
GLANCING = Fall(600, 1.5e-3)

READING = Telling(Fall(3500, 2e-3), 8, 6)  # of clips that are told in words
TELLING = (
    Telling(Fall(3000, 1.5e-3), 12, 8),
    Telling(Fall(1500, 1.2e-3), 8, GRIDS),
    Telling(Fall(450, 9e-4), 8, GRIDS, 0.55),
)
DEEP = Telling(Fall(80, 2e-4), 6, GRIDS, 0.4)  # with all layers
FOLLOWED = Telling(Fall(1200, 2e-3), 4, GRIDS)  # of a drafter

Clips = Sequence[tuple[MovingScene, int]]  # with their numbers


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach a model to see and to tell, or a smaller one to tell what it tells."""
    course = Course(seed, steps, progress)
    return _target(folder, course) if entry.target is None else _drafter(entry, folder, course)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Shares of facts right (a target), or tokens per round at five drafted tokens (a drafter)."""
    processor, model = clip_processor(), load(entry, folder)
    if entry.target is not None:
        return {"acceptance_length": acceptance(model, teacher(entry.target), processor, count)}
    examples = clip_examples(count)
    said = answers(model, processor, examples)
    return {
        name: _share(score(one, text) for one, text in zip(examples, said, strict=True))
        for name, score in (("facts", score_clip), ("motion_facts", score_motion))
    }


def _share(pairs: Iterable[tuple[int, int]]) -> float:
    """Of what was asked, what is right."""
    right, asked = (sum(column) for column in zip(*pairs, strict=True))
    share: float = round(right / max(asked, 1), 4)
    return share


def learn_to_watch(model: Any, words: SlotWords, fall: Fall, course: Course) -> None:
    """Train the vision tower to show what is where in two frames, and which way it goes."""
    generator, scenes = np.random.default_rng((course.seed, 18)), endless_scenes("train")

    def loss_of(_: object) -> Tensor:
        shown, stories = [], []
        for scene, _ in islice(scenes, SEEN):
            grid = _busy(scene, generator)
            pair = [pixels(scene.at(2 * grid + late)) for late in range(2)]
            shown.append(np.stack(pair))
            stories.append(sights(scene).unflatten(0, (GRIDS, -1))[grid])
        return words.loss(clip_features(model, np.stack(shown)), torch.stack(stories))

    tower = model.model.visual
    matrices, others = divided(tower.blocks, tower.parameters())
    fit(others, repeat(None), loss_of, fall, "see", course, matrices)


class SlotHeads(nn.Module):
    """Linear heads that say of each slot what is there: they lead a model's states and are left."""

    def __init__(self, width: int, classes: Sequence[int]) -> None:
        super().__init__()
        self.width, self.classes = width, list(classes)
        self.heads = nn.Linear(width, sum(classes))

    def loss(self, states: Tensor, wanted: Tensor) -> Tensor:  # (B, slots, D), (B, slots, n) -> ()
        """Mean cross entropy of the classes, half of it over slots with things."""
        said = self.heads(functional.layer_norm(states, (self.width,))).float()
        is_there, losses = (wanted[..., 0] > 0).flatten(), []
        for part, true in zip(said.split(self.classes, -1), wanted.unbind(-1), strict=False):
            each = functional.cross_entropy(part.flatten(0, 1), true.flatten(), reduction="none")
            losses.append((each[is_there].mean() + each[~is_there].mean()) / 2)
        return torch.stack(losses).mean()


def learn_to_tell(
    model: Any,
    lessons: Iterator[ClipBatch],
    fall: Fall,
    course: Course,
    heads: SlotHeads | None = None,
) -> None:
    """Train the text model on the words of answers; the tower stays as it is.

    With `heads`, the states of slots in the middle of the text model learn what is there, too:
    without it a model finds out late that places and times are to be read from positions.
    """
    decoder = model.model.language_model

    def loss_of(item: ClipBatch) -> Tensor:
        layers = clip_layers(model, item)
        told = words_loss(model.lm_head(layers[-1][item.labels != IGNORED]).float(), item)
        if heads is None:
            return told
        is_slot = item.ids == model.config.video_token_id
        slots = layers[len(layers) // 2][is_slot].view(*item.story.shape[:2], -1)
        return told + heads.loss(slots, item.story)

    matrices, others = divided(decoder.layers, decoder.parameters())
    others += [] if heads is None else list(heads.parameters())
    fit(others, lessons, loss_of, fall, "tell", course, matrices)


def words_loss(logits: Tensor, item: ClipBatch) -> Tensor:  # (n, V) -> ()
    """Cross entropy of the words of answers, row by row.

    A question counts by the root of its answer's length: whether a thing moves at all is one word
    of one sentence, and captions are long.
    """
    answered = item.labels != IGNORED
    each = functional.cross_entropy(logits, item.labels[answered], reduction="none")
    rows = torch.arange(len(item.ids))[:, None] * (1 + item.groups.max())
    question = (rows + item.groups)[answered]
    weights = torch.bincount(question)[question].rsqrt()
    return (each * weights).sum() / weights.sum()


def begin_to_see(model: Any, name: str) -> None:
    """Begin with the vision tower of a checkpoint that knows the things in still pictures."""
    tower: Any = teacher(name).model.visual
    model.model.visual.load_state_dict(tower.state_dict())


@torch.no_grad()
def looked_at(model: Any, clips: Clips, course: Course) -> Tensor:  # -> (N, SLOTS, D) float16
    """What the tower makes of all clips. Moments that are alike are looked at once."""
    found = torch.empty(len(clips), SLOTS, model.config.text_config.hidden_size).half()
    for at, (scene, _) in enumerate(clips):
        moments, places = np.split(frames_of(scene), GRIDS), dict[bytes, int]()
        of = [places.setdefault(one.tobytes(), len(places)) for one in moments]
        shown = np.stack([moments[of.index(place)] for place in range(len(places))])
        found[at] = clip_features(model, shown)[of].flatten(0, 1)
        course.progress("look", at + 1, len(clips), float("nan"))
    return found


@torch.no_grad()
def deepened(model: Any, processor: Any, shape: LanguageShape) -> Any:
    """A model of more layers that says what a shallower one says."""
    deep: Any = clip_qwen(shape, processor.tokenizer)
    weights = {k: v for k, v in model.state_dict().items() if "language_model.layers." not in k}
    deep.load_state_dict(weights, strict=False)
    expand(model.model.language_model.layers, deep.model.language_model.layers)
    deep.train()
    return deep


def answers(model: Any, processor: Any, examples: Sequence[ClipExample]) -> list[str]:
    """What the model says, greedily, through its own processor."""
    said = []
    for some in chunks(examples, ASKED):
        frames, prompts = [one.frames for one in some], [one.prompt for one in some]
        said += answered(model, processor, frames, prompts).texts
    return said


def acceptance(drafter: Any, target: Any, processor: Any, count: int, k: int = 5) -> float:
    """Mean acceptance length on `count` held-out prompts, answered greedily by the target."""
    tokens, rounds = 0.0, 0.0
    for one in clip_examples(count, seed=1):
        told = answered(target, processor, [one.frames], [one.prompt])
        inputs, said = told.inputs, told.new[0]
        ids = torch.cat((inputs.pop("input_ids"), said[None]), 1)
        inputs.pop("attention_mask")
        types = inputs.pop("mm_token_type_ids")
        inputs["mm_token_type_ids"] = functional.pad(types, (0, len(said)))
        with torch.no_grad():
            logits = drafter(input_ids=ids, **inputs, use_cache=False).logits[0]
        follows = logits[-len(said) - 1 : -1].argmax(-1) == said
        tokens += len(said)
        rounds += len(said) / acceptance_length(follows, k)
    return round(tokens / max(rounds, 1.0), 2)


def _target(folder: Path, course: Course) -> dict[str, Any]:
    processor: Any = clip_processor()
    model: Any = clip_qwen(replace(CLIP_TARGET, layers=FIRST), processor.tokenizer).train()
    begin_with_likeness(model.model.language_model.layers)
    begin_to_see(model, "qwen2.5-vl")
    words = SlotWords.of(model, processor.tokenizer)
    heads = SlotHeads(CLIP_TARGET.width, STORY_CLASSES)
    writer = ClipTeacher(model, processor, QUESTIONS)
    learn_to_watch(model, words, WATCHING, course)
    lessons = writer.told(words, READING, course.seed)
    learn_to_tell(model, lessons, READING.fall, course, heads)
    clips = moving_scenes(course.cut(POOL, TELLING[0].batch), seed=course.seed + 1)
    features = looked_at(model, clips, course)

    def taught(one: Telling, at: Course) -> None:
        scenes = [scene for scene, _ in clips]
        lessons = writer.seen(scenes, features, one, at.seed)
        learn_to_tell(model, lessons, one.fall, at, heads)

    with kept(lambda: save(model, processor, folder, sees=True)):
        for number, one in enumerate(TELLING, 1):
            taught(one, course.later(number))
        model = deepened(model, processor, CLIP_TARGET)
        taught(DEEP, course)
    return {
        "steps": sum(course.cut(one.fall.steps) for one in (READING, *TELLING, DEEP)),
        "clips": len(clips),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _drafter(entry: Entry, folder: Path, course: Course) -> dict[str, Any]:
    assert entry.target is not None
    processor: Any = clip_processor()
    model, target = clip_qwen(SIGHTED, processor.tokenizer).train(), teacher(entry.target)
    begin_with_likeness(model.model.language_model.layers)
    clips = moving_scenes(course.cut(SPOKEN, FOLLOWED.batch), seed=course.seed + 1)
    with kept(lambda: save(model, processor, folder, sees=True)):
        begin_to_see(model, "qwen2.5-vl-drafter")
        learn_to_watch(model, SlotWords.of(model, processor.tokenizer), GLANCING, course)
        said = spoken(target, processor, clips, course)
        lessons = ClipTeacher(model, processor, TOLD).seen(
            [scene for scene, _ in clips],
            looked_at(model, clips, course),
            FOLLOWED,
            course.seed,
            said,
        )
        learn_to_tell(model, lessons, FOLLOWED.fall, course)
    return {
        "steps": course.cut(FOLLOWED.fall.steps),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def spoken(
    target: Any, processor: Any, clips: Clips, course: Course
) -> list[list[tuple[str, str]]]:
    """Questions about each clip, and what a model answers to them."""
    asked = [(clip, number) for clip in range(len(clips)) for number in range(TOLD)]
    said: list[list[tuple[str, str]]] = [[] for _ in clips]
    for some in chunks(asked, ASKED, "speak", course.progress):
        made = told_of(target, processor, clips, some)
        for (clip, _), prompt, text in zip(some, made.prompts, made.texts, strict=True):
            said[clip].append((prompt, text))
    return said


def told_of(
    target: Any, processor: Any, clips: Clips, asked: Sequence[tuple[int, int]]
) -> AnsweredClips:
    """Greedy answers to questions, each a clip's place and the number that `tell` picks it by."""
    prompts = [tell(clips[clip][0], number)[0] for clip, number in asked]
    shown = [torch.from_numpy(frames_of(clips[clip][0])).permute(0, 3, 1, 2) for clip, _ in asked]
    return answered(target, processor, shown, prompts)


@dataclass(frozen=True)
class AnsweredClips:
    """What was asked about clips, the new tokens (B, n) with their ends, and their words."""

    inputs: dict[str, Any]
    prompts: Sequence[str]
    new: Tensor
    texts: list[str]


@torch.no_grad()
def answered(
    model: Any, processor: Any, clips: Sequence[Any], prompts: Sequence[str]
) -> AnsweredClips:
    """Greedy answers; a clip is a list of pictures or a tensor (FRAMES, 3, P, P) of bytes."""
    inputs = requests(processor, clips, prompts)
    out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = out[:, inputs["input_ids"].shape[1] :]
    texts = processor.batch_decode(new, skip_special_tokens=True)
    return AnsweredClips(inputs, prompts, new, texts)


def requests(processor: Any, clips: Sequence[Any], prompts: Sequence[str]) -> dict[str, Any]:
    """What `generate` takes of such clips and prompts, padded on the left."""
    shown = films.shown([films.read(clip, frames=FRAMES) for clip in clips])
    texts = [chat(processor, prompt, ["video"]) for prompt in prompts]
    return dict(processor(text=texts, **shown, padding=True, return_tensors="pt"))


def _busy(scene: MovingScene, generator: np.random.Generator) -> int:
    """A moment of a clip, mostly one in which something moves."""
    if generator.random() < 0.3:
        return int(generator.integers(FRAMES // 2))
    move = scene.moves[generator.integers(len(scene.moves))]
    return int(generator.integers(move.first, move.last + 1)) // 2
