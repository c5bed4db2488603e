"""Train the bundled policy by behaviour cloning, and its feature head."""

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
from mmspec.modalities.common.families import make_reader
from mmspec.modalities.vla.checkpoints import load, processor
from mmspec.modality import Entry
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig
from mmspec.models.prismatic_processor import PrismaticProcessor
from mmspec.training.fitting import CosineDecay, TrainingProgress, TrainingRun
from mmspec.training.heads import TrainingExample
from mmspec.training.self_fed import HASS
from mmspec.training.trainable import train_head
from mmspec.zoo.training import load_teacher, save_on_exit
from tools.zoo.vla.architecture import (
    FIRST,
    HALF,
    KEY,
    LAYERS,
    NEXT,
    build,
    build_tokenizer,
    deepen,
)
from tools.zoo.vla.episodes import PolicyEpisode, run_episodes
from tools.zoo.vla.evaluate import acceptance, figures
from tools.zoo.vla.frames import action_statistics, make_frames
from tools.zoo.vla.policy_training import (
    ActionExamples,
    encode_images,
    perturb,
    train_policy,
    train_towers,
)

ABOUT = """\
Reaches for things of the Scene world on a table (`mmspec.modalities.vla.worlds`), on plain paper
and seen from above; knows no other world.

The policy is trained on a scripted expert by behaviour cloning: first the vision towers, then a
shallow language model on the expert's actions, then deeper ones that begin with its weights. Its
states are also trained to predict the rest of the action, so that a small head can continue them.
The draft head is trained on the target's own actions; its folder also has trajectories of the
target, for drafts by retrieval.
"""
NOTES = """\
`success` is the share of episodes on held-out scenes in which the gripper closes on the named
thing, with its 95 % interval (Wilson); `bits` are the mean entropy of the distribution of each
component; `hold last accepted` is the number of leading components, of seven, that equal the
previous action, exactly or within so many bins (the gripper exactly). `acceptance length` is
tokens per round of greedy chain speculation with six drafted tokens, on held-out scenes, exactly
or with components other than the gripper within so many bins. Measured on the float16 weights,
run in float32.
"""
HELD_OUT = 100
BATCH, TOWER_BATCH = 32, 64
SCENES, EACH = 6000, 3  # training scenes, and pictures of each
TOWER_STAGE = CosineDecay(1600, 2e-3)
FIRST_STAGE = CosineDecay(1450, 2e-3)  # of the shallow policy
DEEPER_STAGES = {
    NEXT: CosineDecay(1540, 9e-4),
    LAYERS: CosineDecay(750, 7e-4),
}  # of deeper ones, towers and all
POOL, HEAD_BATCH, HEAD = 160, 16, CosineDecay(4800, 3e-3)  # training episodes of a head
PASSES = 6  # of a head over each example, on its own states: as many as it drafts
STORED = 80  # episodes in the trajectory store


def train(
    entry: Entry, folder: Path, steps: int | None, seed: int, progress: TrainingProgress
) -> dict[str, Any]:
    """Train a policy on the expert's actions, or a head on the policy's."""
    run = TrainingRun(seed, steps, progress)
    return _train_policy(folder, run) if entry.target is None else _train_head(entry, folder, run)


def measure(entry: Entry, folder: Path, count: int) -> dict[str, float]:
    """Success on held-out scenes (a policy), or tokens per round (a head)."""
    if entry.target is None:
        model = load(entry, folder)
        space = space_of(model)
        episodes = run_episodes(model, processor(entry, folder), space, "held-out", range(count))
        return figures(episodes, space)
    target, processor_ = load_teacher(entry.target), processor(entry, folder)
    episodes = run_episodes(
        target, processor_, space_of(target), "held-out", range(max(1, count // 5))
    )
    of = (target, load(entry, folder), processor_, episodes)
    return {
        "acceptance_length": acceptance(*of),
        "acceptance_length_within_9": acceptance(*of, "spec-vla", radius=9),
    }


def space_of(model: Any) -> ActionSpace:
    """The action space of a bundled policy."""
    config = model.config
    vocabulary = config.text_config.vocab_size - config.pad_to_multiple_of
    codes = ActionCodes(vocabulary, config.n_action_bins)
    return ActionSpace.from_norm_stats(config.norm_stats, KEY, codes)


def _train_policy(folder: Path, run: TrainingRun) -> dict[str, Any]:
    tokenizer = build_tokenizer()
    model = build(tokenizer, action_statistics(run.seed), FIRST).train()
    frames = make_frames(run.limit_steps(SCENES, TOWER_BATCH), EACH, run)
    train_towers(model, frames, TOWER_BATCH, TOWER_STAGE, run)
    examples = ActionExamples(
        frames, model, tokenizer, space_of(model), encode_images(model, frames)
    )
    train_policy(model, examples, BATCH, FIRST_STAGE, run)
    for number, (layers, schedule) in enumerate(DEEPER_STAGES.items(), 1):
        model = deepen(model, tokenizer, layers).train()
        examples = ActionExamples(frames, model, tokenizer, space_of(model))
        with save_on_exit(partial(save, model, tokenizer, folder)):
            train_policy(model, examples, BATCH, schedule, run.with_seed_offset(number))
    return {
        "steps": sum(
            run.limit_steps(schedule.steps) for schedule in (FIRST_STAGE, *DEEPER_STAGES.values())
        ),
        "pictures": len(frames),
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
    processor_: Any = PrismaticProcessor.of(model, tokenizer, means=[HALF] * 2, stds=[HALF] * 2)
    model.half().save_pretrained(folder)
    processor_.save_pretrained(folder)


def _train_head(entry: Entry, folder: Path, run: TrainingRun) -> dict[str, Any]:
    assert entry.target is not None
    target, processor_ = load_teacher(entry.target), processor(entry, folder)
    space = space_of(target)
    seeds = range(run.limit_steps(POOL))
    episodes = run_episodes(target, processor_, space, "train", seeds, run.progress)
    text = target.config.get_text_config(decoder=True)
    head = FeatureHead(FeatureHeadConfig.of(text, text.vocab_size))
    own = head_examples(episodes, processor_, HEAD_BATCH, run.seed)
    frames = make_frames(run.limit_steps(SCENES, HEAD_BATCH), 1, run.with_seed_offset(1))
    examples = ActionExamples(frames, target, processor_.tokenizer, space)
    perturbed = frame_examples(examples, processor_, HEAD_BATCH, run.seed)
    both = chain.from_iterable(zip(own, perturbed, strict=False))

    def finish() -> None:
        cast: Any = head.half
        cast().save_pretrained(folder)
        make_trajectories(episodes[:STORED], space).save(folder)

    with save_on_exit(finish):
        steps = run.limit_steps(HEAD.steps)
        settings = {"passes": PASSES, "weight": 1.0, "top_weight": 0.0}
        train_head(
            HASS, make_reader(target), head, both, steps, HEAD.rate, run.progress, **settings
        )
    return {
        "steps": run.limit_steps(HEAD.steps),
        "parameters": sum(p.numel() for p in head.parameters()),
        "stored_steps": sum(len(one.tokens) for one in episodes[:STORED]),
    }


def head_examples(
    episodes: Sequence[PolicyEpisode], processor_: Any, batch: int, seed: int
) -> Iterator[TrainingExample]:
    """Endless batches of steps of all episodes, with the policy's tokens."""
    moments = [(one, at) for one in episodes for at in range(len(one.tokens))]
    generator = np.random.default_rng((seed, 15))
    while True:
        picked = [moments[i] for i in generator.choice(len(moments), batch)]
        instructions = [one.instruction for one, _ in picked]
        inputs = processor_.instruct(instructions, [one.pictures[at] for one, at in picked])
        yield TrainingExample(dict(inputs), torch.stack([one.tokens[at] for one, at in picked]))


def frame_examples(
    examples: ActionExamples, processor_: Any, batch: int, seed: int
) -> Iterator[TrainingExample]:
    """Endless batches of pictures of the perturbed expert, with noisy actions of it.

    They cover more states than the policy's own episodes.
    """
    frames, space = examples.frames, examples.space
    generator = np.random.default_rng((seed, 16))
    while True:
        picked = generator.choice(len(frames), batch)
        which = [generator.integers(len(frames.instructions[i])) for i in picked]
        pairs = list(zip(picked, which, strict=True))
        raw = torch.from_numpy(np.stack([frames.actions[i][k] for i, k in pairs]))
        tokens = examples.tokens(perturb(space.normalise(raw), generator))
        inputs = processor_.instruct(
            [frames.instructions[i][k] for i, k in pairs], list(frames.images[picked])
        )
        yield TrainingExample(dict(inputs), tokens)


def make_trajectories(episodes: Sequence[PolicyEpisode], space: ActionSpace) -> Trajectories:
    """The retrieval store: features, normalised actions and states per episode."""
    return Trajectories.from_episodes(
        (
            torch.stack(one.features),
            space.decode(torch.stack(one.tokens)),
            torch.from_numpy(np.stack(one.states)),
        )
        for one in episodes
    )
