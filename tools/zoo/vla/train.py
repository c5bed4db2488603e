"""Train the robot policy of the zoo by behaviour cloning, and the head that drafts for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.trajectories import Trajectories
from mmspec.modalities.common.families import reader as reader_of
from mmspec.modalities.vla.checkpoints import load, processor
from mmspec.modality import Entry
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.prismatic_processor import PrismaticProcessor
from mmspec.training.fitting import Course, Fall
from mmspec.training.heads import Lesson
from mmspec.training.reporting import Report
from mmspec.training.self_fed import HASS
from mmspec.training.trainable import learn
from mmspec.zoo.training import kept, teacher
from tools.zoo.vla.architecture import (
    FIRST,
    HALF,
    KEY,
    LAYERS,
    NEXT,
    build,
    build_tokenizer,
    grown,
)
from tools.zoo.vla.driving import DrivenEpisode, drive
from tools.zoo.vla.evaluate import acceptance, figures
from tools.zoo.vla.frames import frames, statistics
from tools.zoo.vla.learning import (
    ActionTeacher,
    learn_to_act,
    learn_to_see,
    looks,
    shaken,
)

ABOUT = """\
Reaches for things of the Scene world on a table (`mmspec.modalities.vla.worlds`), on plain paper
and seen from above; knows no other world.

A policy learned from a scripted expert by behaviour cloning: first its towers to see, then a
shallow language model to say the expert's actions, then deeper ones grown from it. Its states also
learn to tell the rest of the action, so that they can be continued. A head learned from what its
target does; beside it lie trajectories of the target, for drafts by retrieval.
"""
NOTES = """\
`success` is the share of episodes on held-out scenes in which the gripper closes on the named
thing, with its 95 % interval (Wilson); `bits` are the mean entropy of the distribution of each
component;
`hold last accepted` is how many of the seven components the last action has right from the front,
exactly or within so many bins (the gripper exactly). `acceptance length` is tokens per round of
greedy chain speculation with six drafted tokens, on the held-out scenes, exactly or with components
but the gripper within so many bins. Measured on the float16 weights, run in float32.
"""
HELD_OUT = 100
BATCH, SEEN_AT_ONCE = 32, 64
SCENES, EACH = 6000, 3  # training scenes, and pictures of each
SEEING = Fall(1600, 2e-3)
ACTING = Fall(1450, 2e-3)  # of the shallow policy
DEEPENING = {NEXT: Fall(1540, 9e-4), LAYERS: Fall(750, 7e-4)}  # of deeper ones, towers and all
POOL, HEAD_BATCH, HEAD = 160, 16, Fall(4800, 3e-3)  # episodes that a head learns from
PASSES = 6  # of a head over each lesson, on states of its own: as many as it drafts
STORED = 80  # of them are kept beside the head


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: Report
) -> dict[str, Any]:
    """Teach a policy to act as the expert does, or a head to follow a policy."""
    course = Course(seed, steps, progress)
    return _policy(folder, course) if entry.target is None else _head(entry, folder, course)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Success on held-out scenes (a policy), or tokens per round (a head)."""
    if entry.target is None:
        model = load(entry, folder)
        space = space_of(model)
        episodes = drive(model, processor(entry, folder), space, "held-out", range(count))
        return figures(episodes, space)
    target, ears = teacher(entry.target), processor(entry, folder)
    episodes = drive(target, ears, space_of(target), "held-out", range(max(1, count // 5)))
    of = (target, load(entry, folder), ears, episodes)
    return {
        "acceptance_length": acceptance(*of),
        "acceptance_length_within_9": acceptance(*of, "spec-vla", radius=9),
    }


def space_of(model: Any) -> ActionSpace:
    """What the tokens of a policy of the zoo mean."""
    config = model.config
    vocabulary = config.text_config.vocab_size - config.pad_to_multiple_of
    codes = ActionCodes(vocabulary, config.n_action_bins)
    return ActionSpace.keyed(config.norm_stats, KEY, codes)


def _policy(folder: Path, course: Course) -> dict[str, Any]:
    tokenizer = build_tokenizer()
    model = build(tokenizer, statistics(course.seed), FIRST).train()
    taught = frames(course.cut(SCENES, SEEN_AT_ONCE), EACH, course)
    learn_to_see(model, taught, SEEN_AT_ONCE, SEEING, course)
    lessons = ActionTeacher(taught, model, tokenizer, space_of(model), looks(model, taught))
    learn_to_act(model, lessons, BATCH, ACTING, course)
    for number, (layers, fall) in enumerate(DEEPENING.items(), 1):
        model = grown(model, tokenizer, layers).train()
        lessons = ActionTeacher(taught, model, tokenizer, space_of(model))
        with kept(partial(save, model, tokenizer, folder)):
            learn_to_act(model, lessons, BATCH, fall, course.later(number))
    return {
        "steps": sum(course.cut(fall.steps) for fall in (ACTING, *DEEPENING.values())),
        "pictures": len(taught),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save weights in float16, configuration and processor."""
    configure: Any = GenerationConfig
    model.generation_config = configure(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    ears: Any = PrismaticProcessor.of(model, tokenizer, means=[HALF] * 2, stds=[HALF] * 2)
    model.half().save_pretrained(folder)
    ears.save_pretrained(folder)


def _head(entry: Entry, folder: Path, course: Course) -> dict[str, Any]:
    assert entry.target is not None
    target, ears = teacher(entry.target), processor(entry, folder)
    space = space_of(target)
    seeds = range(course.cut(POOL))
    episodes = drive(target, ears, space, "train", seeds, course.progress)
    text = target.config.get_text_config(decoder=True)
    head = FeatureHead(FeatureHeadConfig.of(text, text.vocab_size))
    done = head_lessons(episodes, ears, HEAD_BATCH, course.seed)
    taught = frames(course.cut(SCENES, HEAD_BATCH), 1, course.later(1))
    lessons = ActionTeacher(taught, target, ears.tokenizer, space)
    shown = frame_lessons(lessons, ears, HEAD_BATCH, course.seed)
    both = chain.from_iterable(zip(done, shown, strict=False))

    def finish() -> None:
        cast: Any = head.half
        cast().save_pretrained(folder)
        stored(episodes[:STORED], space).save(folder)

    with kept(finish):
        steps = course.cut(HEAD.steps)
        settings = {"passes": PASSES, "weight": 1.0, "top_weight": 0.0}
        learn(HASS, reader_of(target), head, both, steps, HEAD.rate, course.progress, **settings)
    return {
        "steps": course.cut(HEAD.steps),
        "parameters": sum(p.numel() for p in head.parameters()),
        "stored_steps": sum(len(one.tokens) for one in episodes[:STORED]),
    }


def head_lessons(
    episodes: Sequence[DrivenEpisode], ears: Any, batch: int, seed: int
) -> Iterator[Lesson]:
    """Moments of all episodes in batches without end, with what the policy said to them."""
    moments = [(one, at) for one in episodes for at in range(len(one.tokens))]
    generator = np.random.default_rng((seed, 15))
    while True:
        picked = [moments[i] for i in generator.choice(len(moments), batch)]
        asked = [one.instruction for one, _ in picked]
        inputs = ears.instruct(asked, [one.pictures[at] for one, at in picked])
        yield Lesson(dict(inputs), torch.stack([one.tokens[at] for one, at in picked]))


def frame_lessons(lessons: ActionTeacher, ears: Any, batch: int, seed: int) -> Iterator[Lesson]:
    """Pictures of the pushed expert without end, with its actions a little off.

    They show more than the policy's own episodes do; what it would say there is read beside.
    """
    taught, space = lessons.taught, lessons.space
    generator = np.random.default_rng((seed, 16))
    while True:
        picked = generator.choice(len(taught), batch)
        which = [generator.integers(len(taught.asked[i])) for i in picked]
        pairs = list(zip(picked, which, strict=True))
        raw = torch.from_numpy(np.stack([taught.actions[i][k] for i, k in pairs]))
        said = lessons.tokens(shaken(space.normalise(raw), generator))
        inputs = ears.instruct([taught.asked[i][k] for i, k in pairs], list(taught.images[picked]))
        yield Lesson(dict(inputs), said)


def stored(episodes: Sequence[DrivenEpisode], space: ActionSpace) -> Trajectories:
    """What retrieval looks up: features, normalised actions and states, episode by episode."""
    return Trajectories.of(
        (
            torch.stack(one.features),
            space.values(torch.stack(one.tokens)),
            torch.from_numpy(np.stack(one.states)),
        )
        for one in episodes
    )
