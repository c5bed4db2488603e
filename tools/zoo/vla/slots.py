"""Train action slots that draft whole actions in one pass (OFT as a draft model)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.modalities.common.families import make_reader
from mmspec.modalities.vla.checkpoints import load, processor
from mmspec.modality import Entry
from mmspec.training.action_slots import ACTION_SLOTS_TRAINING, new_slots
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun, shuffle_batches
from mmspec.training.heads import TrainingExample
from mmspec.training.trainable import train_head
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vla.episodes import run_episodes
from tools.zoo.vla.evaluate import acceptance
from tools.zoo.vla.frames import make_frames
from tools.zoo.vla.policy_training import ActionExamples, perturb
from tools.zoo.vla.train import space_of

ABOUT = """\
Predicts all seven tokens of an action in one pass over the states that the policy has of its
prompt; fits no other target.

Trained on the policy's actions in its own episodes, and on those that it predicts for images of a
randomly displaced expert, which cover more scenes. The policy reads every image once.
"""
NOTES = """\
`acceptance length` is tokens per round of greedy decoding with `oft-draft`, and `within 9` with
`oft-draft-tolerance` of so many bins (the gripper exactly), in episodes that are reset at every
step, so that no previous action can be proposed; on held-out scenes. Measured on the float16
weights, run in float32.
"""
HELD_OUT = 100
EPISODES = 600  # of the policy itself
SCENES, EACH = 6000, 2
BATCH, SLOTS = 32, CosineDecay(12000, 2e-3)


@dataclass(frozen=True)
class Moment:
    """An instruction, a picture, and action tokens (7,) of the policy or the expert."""

    instruction: str
    picture: np.ndarray
    tokens: Tensor


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train slots to predict the actions of a bundled policy."""
    assert entry.target is not None
    run = TrainingRun(seed, steps, progress)
    target, processor_ = load_teacher(entry.target), processor(entry, folder)
    moments = [*_policy_moments(target, processor_, run), *_expert_moments(target, processor_, run)]
    reader, count = make_reader(target), run.limit_steps(SLOTS.steps)
    head = new_slots(reader, torch.zeros(reader.vocabulary))

    def finish() -> None:
        cast: Any = head.half
        cast().save_pretrained(folder)

    with TemporaryDirectory() as scratch, save_on_exit(finish):
        cache = FeatureCache(Path(scratch), {}, None, shard_bytes=1 << 40)  # stays in memory
        examples = slot_examples(moments, processor_, cache, BATCH, seed)
        schedule = (count, SLOTS.rate, progress)
        train_head(ACTION_SLOTS_TRAINING, reader, head, examples, *schedule, corrects=True)
    return {
        "steps": count,
        "moments": len(moments),
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Tokens per round on held-out scenes, exactly and within a tolerance."""
    assert entry.target is not None
    target, processor_ = load_teacher(entry.target), processor(entry, folder)
    episodes = run_episodes(
        target, processor_, space_of(target), "held-out", range(max(1, count // 5))
    )
    of = (target, load(entry, folder), processor_, episodes)
    return {
        "acceptance_length": acceptance(*of, "oft-draft"),
        "acceptance_length_within_9": acceptance(*of, "oft-draft-tolerance", radius=9),
    }


def slot_examples(
    moments: Sequence[Moment], processor_: Any, cache: FeatureCache, batch: int, seed: int
) -> Iterator[TrainingExample]:
    """Endless batches of moments; cached features are reused."""
    whole = len(moments) - len(moments) % batch
    for picked in shuffle_batches(whole, batch, np.random.default_rng((seed, 17))):
        own = [moments[i] for i in picked]
        inputs: dict[str, Any] = {}
        if not all(cache.contains("hidden", int(i)) for i in picked):
            inputs = dict(
                processor_.instruct([o.instruction for o in own], [o.picture for o in own])
            )
        tokens = torch.stack([one.tokens for one in own])
        yield TrainingExample(inputs, tokens, cache, picked.tolist())


def _policy_moments(target: Any, processor_: Any, run: TrainingRun) -> list[Moment]:
    """All steps of the policy's episodes."""
    seeds = range(run.limit_steps(EPISODES))
    episodes = run_episodes(target, processor_, space_of(target), "train", seeds, run.progress)
    return [
        Moment(one.instruction, picture, tokens)
        for one in episodes
        for picture, tokens in zip(one.pictures, one.tokens, strict=True)
    ]


def _expert_moments(target: Any, processor_: Any, run: TrainingRun) -> list[Moment]:
    """Pictures of the perturbed expert, with noisy actions of it."""
    space = space_of(target)
    frames = make_frames(run.limit_steps(SCENES, BATCH), EACH, run.with_seed_offset(1))
    examples = ActionExamples(frames, target, processor_.tokenizer, space)
    generator = np.random.default_rng((run.seed, 18))
    which = [int(generator.integers(len(row))) for row in frames.instructions]
    raw = torch.from_numpy(np.stack([own[k] for own, k in zip(frames.actions, which, strict=True)]))
    tokens = examples.tokens(perturb(space.normalise(raw), generator))
    return [
        Moment(frames.instructions[i][k], frames.images[i], tokens[i]) for i, k in enumerate(which)
    ]
