"""Train the bundled clip model and its draft model."""

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

from mmspec.modalities.vlm.checkpoints import load
from mmspec.modalities.vlm.clips import processor_arguments, read
from mmspec.modalities.vlm.formatting import format_chat
from mmspec.modality import Entry
from mmspec.training.fitting import (
    CosineDecay,
    TrainingProgress,
    TrainingRun,
    fit,
    iterate_chunks,
    split_parameters,
)
from mmspec.zoo.clip_questions import (
    ClipExample,
    clip_examples,
    score_clip,
    score_motion,
    write_clip_text,
)
from mmspec.zoo.motion import FRAMES, MovingScene, iterate_moving_scenes, sample_moving_scenes
from mmspec.zoo.scene_tensors import render_pixels
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.initialization import expand_blocks, mimetic_init
from tools.zoo.vlm.architecture import CLIP_TARGET, SIGHTED, LanguageShape, clip_qwen
from tools.zoo.vlm.batches import IGNORED
from tools.zoo.vlm.clip_batches import (
    GRIDS,
    SLOTS,
    STORY_CLASSES,
    ClipBatch,
    ClipBatcher,
    TrainingStage,
    clip_features,
    clip_layers,
    render_frames,
    slot_labels,
)
from tools.zoo.vlm.evaluate import acceptance_length
from tools.zoo.vlm.processors import clip_processor
from tools.zoo.vlm.slot_embeddings import SlotEmbeddings
from tools.zoo.vlm.train import save

ABOUT = """\
Knows only moving scenes of the `mmspec` zoo: things of the Scene world that move from place to
place on paper, one after the other, in a clip of 32 frames, two per second.

The vision tower of the target is trained on frames to give the embeddings of words for things and
their directions, and a shallow text model to answer from such embeddings; then the text model is
trained on features of the tower, and finally with more layers. A drafter is trained on its
target's answers.
"""
NOTES = """\
`facts` is the share of correct facts in greedy outputs for held-out clips: what moves, in which
direction and where to, in which order, what stays, and where all things are at first and at last;
`motion facts` leaves the last two out. Invented things count as wrong. `acceptance length` is
tokens per round of greedy chain speculation with five drafted tokens, on held-out clips. All are
measured on the float16 weights, run in float32.
"""
HELD_OUT = 100
MAX_NEW_TOKENS = 160
SHALLOW_LAYERS = 6  # of the text model before block expansion
TOWER_DECAY = CosineDecay(3000, 1.5e-3)
TOWER_BATCH = 48  # moments in a batch of the tower
POOL, QUESTIONS = 5000, 6  # clips for the target, and questions per clip
DRAFTER_POOL, DRAFTER_QUESTIONS = 400, 3  # clips for the drafter, and questions per clip
GENERATION_BATCH = 16
DRAFTER_TOWER_DECAY = CosineDecay(600, 1.5e-3)

SYNTHETIC_STAGE = TrainingStage(CosineDecay(3500, 2e-3), 8, 6)  # on slot embeddings
RENDERED_STAGES = (
    TrainingStage(CosineDecay(3000, 1.5e-3), 12, 8),
    TrainingStage(CosineDecay(1500, 1.2e-3), 8, GRIDS),
    TrainingStage(CosineDecay(450, 9e-4), 8, GRIDS, 0.55),
)
DEEP_STAGE = TrainingStage(CosineDecay(80, 2e-4), 6, GRIDS, 0.4)  # after block expansion
DRAFTER_STAGE = TrainingStage(CosineDecay(1200, 2e-3), 4, GRIDS)

Clips = Sequence[tuple[MovingScene, int]]  # with their seeds


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train the target, or a drafter on the answers of its target."""
    course = TrainingRun(seed, steps, progress)
    return _target(folder, course) if entry.target is None else _drafter(entry, folder, course)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Return shares of facts right (target), or the acceptance length at five draft tokens."""
    processor, model = clip_processor(), load(entry, folder)
    if entry.target is not None:
        return {
            "acceptance_length": acceptance(model, load_teacher(entry.target), processor, count)
        }
    examples = clip_examples(count)
    texts = generate_texts(model, processor, examples)
    return {
        name: _share(score(one, text) for one, text in zip(examples, texts, strict=True))
        for name, score in (("facts", score_clip), ("motion_facts", score_motion))
    }


def _share(pairs: Iterable[tuple[int, int]]) -> float:
    """Return the share of facts right."""
    right, total = (sum(column) for column in zip(*pairs, strict=True))
    share: float = round(right / max(total, 1), 4)
    return share


def train_vision_tower(
    model: Any, embeddings: SlotEmbeddings, decay: CosineDecay, course: TrainingRun
) -> None:
    """Train the vision tower on pairs of frames: its features match the slot embeddings."""
    generator, scenes = np.random.default_rng((course.seed, 18)), iterate_moving_scenes("train")

    def loss_of(_: object) -> Tensor:
        pairs, stories = [], []
        for scene, _ in islice(scenes, TOWER_BATCH):
            grid = _sample_moment(scene, generator)
            pair = [render_pixels(scene.scene_at(2 * grid + late)) for late in range(2)]
            pairs.append(np.stack(pair))
            stories.append(slot_labels(scene).unflatten(0, (GRIDS, -1))[grid])
        return embeddings.loss(clip_features(model, np.stack(pairs)), torch.stack(stories))

    tower = model.model.visual
    matrices, others = split_parameters(tower.blocks, tower.parameters())
    fit(others, repeat(None), loss_of, decay, "see", course, matrices)


class SlotHeads(nn.Module):
    """Linear heads that classify slots: an auxiliary loss, not saved with the model."""

    def __init__(self, width: int, classes: Sequence[int]) -> None:
        super().__init__()
        self.width, self.classes = width, list(classes)
        self.heads = nn.Linear(width, sum(classes))

    def loss(self, states: Tensor, labels: Tensor) -> Tensor:  # (B, slots, D), (B, slots, n) -> ()
        """Return the mean cross entropy, with equal weight for slots with and without things."""
        logits = self.heads(functional.layer_norm(states, (self.width,))).float()
        is_there, losses = (labels[..., 0] > 0).flatten(), []
        for part, true in zip(logits.split(self.classes, -1), labels.unbind(-1), strict=False):
            each = functional.cross_entropy(part.flatten(0, 1), true.flatten(), reduction="none")
            losses.append((each[is_there].mean() + each[~is_there].mean()) / 2)
        return torch.stack(losses).mean()


def train_text_model(
    model: Any,
    batches: Iterator[ClipBatch],
    decay: CosineDecay,
    course: TrainingRun,
    heads: SlotHeads | None = None,
) -> None:
    """Train the text model on the tokens of answers; the tower is frozen.

    `heads` add a loss on the slot states in the middle of the text model: without it the model
    learns late to read places and times from position ids.
    """
    decoder = model.model.language_model

    def loss_of(item: ClipBatch) -> Tensor:
        layers = clip_layers(model, item)
        loss = response_loss(model.lm_head(layers[-1][item.labels != IGNORED]).float(), item)
        if heads is None:
            return loss
        is_slot = item.ids == model.config.video_token_id
        slots = layers[len(layers) // 2][is_slot].view(*item.story.shape[:2], -1)
        return loss + heads.loss(slots, item.story)

    matrices, others = split_parameters(decoder.layers, decoder.parameters())
    others += [] if heads is None else list(heads.parameters())
    fit(others, batches, loss_of, decay, "tell", course, matrices)


def response_loss(logits: Tensor, item: ClipBatch) -> Tensor:  # (n, V) -> ()
    """Return the weighted cross entropy of the tokens of answers.

    The weight of an answer is the square root of its length, so that captions do not dominate.
    """
    is_answer = item.labels != IGNORED
    each = functional.cross_entropy(logits, item.labels[is_answer], reduction="none")
    rows = torch.arange(len(item.ids))[:, None] * (1 + item.groups.max())
    question = (rows + item.groups)[is_answer]
    weights = torch.bincount(question)[question].rsqrt()
    return (each * weights).sum() / weights.sum()


def copy_vision_tower(model: Any, name: str) -> None:
    """Copy the vision tower of a checkpoint trained on images."""
    tower: Any = load_teacher(name).model.visual
    model.model.visual.load_state_dict(tower.state_dict())


@torch.no_grad()
def compute_features(
    model: Any, clips: Clips, course: TrainingRun
) -> Tensor:  # -> (N, SLOTS, D) float16
    """Compute the vision features of all clips; equal moments are encoded once."""
    found = torch.empty(len(clips), SLOTS, model.config.text_config.hidden_size).half()
    for at, (scene, _) in enumerate(clips):
        moments, indices = np.split(render_frames(scene), GRIDS), dict[bytes, int]()
        inverse = [indices.setdefault(one.tobytes(), len(indices)) for one in moments]
        unique = np.stack([moments[inverse.index(index)] for index in range(len(indices))])
        found[at] = clip_features(model, unique)[inverse].flatten(0, 1)
        course.progress("look", at + 1, len(clips), float("nan"))
    return found


@torch.no_grad()
def deepen(model: Any, processor: Any, shape: LanguageShape) -> Any:
    """Expand a model to more layers without changing its outputs."""
    deep: Any = clip_qwen(shape, processor.tokenizer)
    weights = {k: v for k, v in model.state_dict().items() if "language_model.layers." not in k}
    deep.load_state_dict(weights, strict=False)
    expand_blocks(model.model.language_model.layers, deep.model.language_model.layers)
    deep.train()
    return deep


def generate_texts(model: Any, processor: Any, examples: Sequence[ClipExample]) -> list[str]:
    """Generate texts greedily with the model's own processor."""
    texts = []
    for some in iterate_chunks(examples, GENERATION_BATCH):
        frames, prompts = [one.frames for one in some], [one.prompt for one in some]
        texts += generate_responses(model, processor, frames, prompts).texts
    return texts


def acceptance(drafter: Any, target: Any, processor: Any, count: int, k: int = 5) -> float:
    """Return the mean acceptance length on `count` held-out prompts with greedy target answers."""
    tokens, rounds = 0.0, 0.0
    for one in clip_examples(count, seed=1):
        answer = generate_responses(target, processor, [one.frames], [one.prompt])
        inputs, new = answer.inputs, answer.new[0]
        ids = torch.cat((inputs.pop("input_ids"), new[None]), 1)
        inputs.pop("attention_mask")
        types = inputs.pop("mm_token_type_ids")
        inputs["mm_token_type_ids"] = functional.pad(types, (0, len(new)))
        with torch.no_grad():
            logits = drafter(input_ids=ids, **inputs, use_cache=False).logits[0]
        follows = logits[-len(new) - 1 : -1].argmax(-1) == new
        tokens += len(new)
        rounds += len(new) / acceptance_length(follows, k)
    return round(tokens / max(rounds, 1.0), 2)


def _target(folder: Path, course: TrainingRun) -> dict[str, Any]:
    processor: Any = clip_processor()
    model: Any = clip_qwen(replace(CLIP_TARGET, layers=SHALLOW_LAYERS), processor.tokenizer).train()
    mimetic_init(model.model.language_model.layers)
    copy_vision_tower(model, "qwen2.5-vl")
    embeddings = SlotEmbeddings.from_model(model, processor.tokenizer)
    heads = SlotHeads(CLIP_TARGET.width, STORY_CLASSES)
    batcher = ClipBatcher(model, processor, QUESTIONS)
    train_vision_tower(model, embeddings, TOWER_DECAY, course)
    batches = batcher.iterate_synthetic(embeddings, SYNTHETIC_STAGE, course.seed)
    train_text_model(model, batches, SYNTHETIC_STAGE.decay, course, heads)
    count = course.limit_steps(POOL, RENDERED_STAGES[0].batch)
    clips = sample_moving_scenes(count, seed=course.seed + 1)
    features = compute_features(model, clips, course)

    def train_stage(stage: TrainingStage, run: TrainingRun) -> None:
        scenes = [scene for scene, _ in clips]
        batches = batcher.iterate_rendered(scenes, features, stage, run.seed)
        train_text_model(model, batches, stage.decay, run, heads)

    with save_on_exit(lambda: save(model, processor, folder, sees=True)):
        for number, one in enumerate(RENDERED_STAGES, 1):
            train_stage(one, course.with_seed_offset(number))
        model = deepen(model, processor, CLIP_TARGET)
        train_stage(DEEP_STAGE, course)
    return {
        "steps": sum(
            course.limit_steps(one.decay.steps)
            for one in (SYNTHETIC_STAGE, *RENDERED_STAGES, DEEP_STAGE)
        ),
        "clips": len(clips),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _drafter(entry: Entry, folder: Path, course: TrainingRun) -> dict[str, Any]:
    assert entry.target is not None
    processor: Any = clip_processor()
    model, target = clip_qwen(SIGHTED, processor.tokenizer).train(), load_teacher(entry.target)
    mimetic_init(model.model.language_model.layers)
    count = course.limit_steps(DRAFTER_POOL, DRAFTER_STAGE.batch)
    clips = sample_moving_scenes(count, seed=course.seed + 1)
    with save_on_exit(lambda: save(model, processor, folder, sees=True)):
        copy_vision_tower(model, "qwen2.5-vl-drafter")
        embeddings = SlotEmbeddings.from_model(model, processor.tokenizer)
        train_vision_tower(model, embeddings, DRAFTER_TOWER_DECAY, course)
        answers = collect_responses(target, processor, clips, course)
        batches = ClipBatcher(model, processor, DRAFTER_QUESTIONS).iterate_rendered(
            [scene for scene, _ in clips],
            compute_features(model, clips, course),
            DRAFTER_STAGE,
            course.seed,
            answers,
        )
        train_text_model(model, batches, DRAFTER_STAGE.decay, course)
    return {
        "steps": course.limit_steps(DRAFTER_STAGE.decay.steps),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def collect_responses(
    target: Any, processor: Any, clips: Clips, course: TrainingRun
) -> list[list[tuple[str, str]]]:
    """Generate answers to questions about each clip; returns (prompt, answer) pairs per clip."""
    questions = [
        (clip, number) for clip in range(len(clips)) for number in range(DRAFTER_QUESTIONS)
    ]
    answers: list[list[tuple[str, str]]] = [[] for _ in clips]
    for some in iterate_chunks(questions, GENERATION_BATCH, "speak", course.progress):
        made = generate_for_questions(target, processor, clips, some)
        for (clip, _), prompt, text in zip(some, made.prompts, made.texts, strict=True):
            answers[clip].append((prompt, text))
    return answers


def generate_for_questions(
    target: Any, processor: Any, clips: Clips, questions: Sequence[tuple[int, int]]
) -> ClipResponses:
    """Answer questions greedily, each given by the index of a clip and a seed."""
    scenes = [clips[clip][0] for clip, _ in questions]
    prompts = [
        write_clip_text(scene, seed)[0] for scene, (_, seed) in zip(scenes, questions, strict=True)
    ]
    frames = [torch.from_numpy(render_frames(scene)).permute(0, 3, 1, 2) for scene in scenes]
    return generate_responses(target, processor, frames, prompts)


@dataclass(frozen=True)
class ClipResponses:
    """Inputs and prompts about clips, the new tokens (B, n) with end tokens, and their texts."""

    inputs: dict[str, Any]
    prompts: Sequence[str]
    new: Tensor
    texts: list[str]


@torch.no_grad()
def generate_responses(
    model: Any, processor: Any, clips: Sequence[Any], prompts: Sequence[str]
) -> ClipResponses:
    """Generate greedily; a clip is a list of images or a tensor (FRAMES, 3, P, P) of bytes."""
    inputs = make_requests(processor, clips, prompts)
    out = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    new = out[:, inputs["input_ids"].shape[1] :]
    texts = processor.batch_decode(new, skip_special_tokens=True)
    return ClipResponses(inputs, prompts, new, texts)


def make_requests(processor: Any, clips: Sequence[Any], prompts: Sequence[str]) -> dict[str, Any]:
    """Return inputs of `generate` for clips and prompts, padded on the left."""
    videos = processor_arguments([read(clip, frames=FRAMES) for clip in clips])
    texts = [format_chat(processor, prompt, ["video"]) for prompt in prompts]
    return dict(processor(text=texts, **videos, padding=True, return_tensors="pt"))


def _sample_moment(scene: MovingScene, generator: np.random.Generator) -> int:
    """Sample a moment of a clip: 70 % during a move."""
    if generator.random() < 0.3:
        return int(generator.integers(FRAMES // 2))
    move = scene.moves[generator.integers(len(scene.moves))]
    return int(generator.integers(move.first, move.last + 1)) // 2
