"""Train the slots that draft whole actions of the zoo's policy, in one pass (OFT as a drafter)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.modalities.common.families import reader as reader_of
from mmspec.modalities.vla.checkpoints import load, processor
from mmspec.modality import Entry
from mmspec.training.action_slots import ACTION_SLOTS_TRAINING, new_slots
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.fitting import Course, Fall, shuffled
from mmspec.training.heads import Lesson
from mmspec.training.reporting import Report
from mmspec.training.trainable import learn
from mmspec.zoo.training import kept, teacher
from tools.zoo.vla.driving import drive
from tools.zoo.vla.evaluate import acceptance
from tools.zoo.vla.frames import frames
from tools.zoo.vla.learning import ActionTeacher, shaken
from tools.zoo.vla.train import space_of

ABOUT = """\
Slots for the seven tokens of an action, filled in one pass over the states that the policy has of
its prompt; fits no other target.

Learned from what the policy does in episodes of its own, and from what it would do at pictures of
an expert that is pushed about, which show more scenes. Each moment is read by the policy once.
"""
NOTES = """\
`acceptance length` is tokens per round of greedy decoding under `oft-draft`, and `within 9` under
`oft-draft-tolerance` of so many bins (the gripper exactly) in episodes that begin anew at every
step, so that no action is there to be held; on held-out scenes. Measured on the float16 weights,
run in float32.
"""
HELD_OUT = 100
EPISODES = 600  # of its own
SCENES, EACH = 6000, 2
BATCH, SLOTS = 32, Fall(12000, 2e-3)


@dataclass(frozen=True)
class Moment:
    """What is asked and seen, and what is said or might be said to it, (7,)."""

    instruction: str
    picture: np.ndarray
    tokens: Tensor


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach slots what a policy of the zoo does."""
    assert entry.target is not None
    course = Course(seed, steps, progress)
    target, ears = teacher(entry.target), processor(entry, folder)
    moments = [*_own(target, ears, course), *_shown(target, ears, course)]
    reader, count = reader_of(target), course.cut(SLOTS.steps)
    head = new_slots(reader, torch.zeros(reader.vocabulary))

    def finish() -> None:
        cast: Any = head.half
        cast().save_pretrained(folder)

    with TemporaryDirectory() as scratch, kept(finish):
        cache = FeatureCache(Path(scratch), {}, None, shard_bytes=1 << 40)  # stays in memory
        given = lessons(moments, ears, cache, BATCH, seed)
        how = (count, SLOTS.rate, progress)
        learn(ACTION_SLOTS_TRAINING, reader, head, given, *how, corrects=True)
    return {
        "steps": count,
        "moments": len(moments),
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Tokens per round on held-out scenes, exactly and within a tolerance."""
    assert entry.target is not None
    target, ears = teacher(entry.target), processor(entry, folder)
    episodes = drive(target, ears, space_of(target), "held-out", range(max(1, count // 5)))
    of = (target, load(entry, folder), ears, episodes)
    return {
        "acceptance_length": acceptance(*of, "oft-draft"),
        "acceptance_length_within_9": acceptance(*of, "oft-draft-tolerance", radius=9),
    }


def lessons(
    moments: Sequence[Moment], ears: Any, cache: FeatureCache, batch: int, seed: int
) -> Iterator[Lesson]:
    """Moments in batches without end; those that the cache knows are not asked again."""
    whole = len(moments) - len(moments) % batch
    for picked in shuffled(whole, batch, np.random.default_rng((seed, 17))):
        own = [moments[i] for i in picked]
        inputs: dict[str, Any] = {}
        if not all(cache.known("hidden", int(i)) for i in picked):
            inputs = dict(ears.instruct([o.instruction for o in own], [o.picture for o in own]))
        said = torch.stack([one.tokens for one in own])
        yield Lesson(inputs, said, cache, picked.tolist())


def _own(target: Any, ears: Any, course: Course) -> list[Moment]:
    """All moments of the policy's episodes."""
    seeds = range(course.cut(EPISODES))
    episodes = drive(target, ears, space_of(target), "train", seeds, course.progress)
    return [
        Moment(one.instruction, picture, said)
        for one in episodes
        for picture, said in zip(one.pictures, one.tokens, strict=True)
    ]


def _shown(target: Any, ears: Any, course: Course) -> list[Moment]:
    """Pictures of the pushed expert, with its actions a little off."""
    space = space_of(target)
    taught = frames(course.cut(SCENES, BATCH), EACH, course.later(1))
    asker = ActionTeacher(taught, target, ears.tokenizer, space)
    generator = np.random.default_rng((course.seed, 18))
    which = [int(generator.integers(len(asked))) for asked in taught.asked]
    raw = torch.from_numpy(np.stack([own[k] for own, k in zip(taught.actions, which, strict=True)]))
    said = asker.tokens(shaken(space.normalise(raw), generator))
    return [Moment(taught.asked[i][k], taught.images[i], said[i]) for i, k in enumerate(which)]
