"""What a policy's drafter is taught: moments of episodes, asked as the policy is asked.

A row of data is a moment, {"prompt": "reach the red cube", "image": "0-3.png"}, "images" of several
cameras; its answer, where the data have one, is the action in the robot's units, "0.01 -0.02 ...".
A policy also makes data by itself: it acts in a world, and every moment is one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmspec.api import accelerate
from mmspec.modalities.common import formatting
from mmspec.modalities.common.pictures import open_picture
from mmspec.modalities.vla.answering import BoundPolicy
from mmspec.modalities.vla.reading import PromptReader, checked_instruction
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.worlds import WORLDS, make_world
from mmspec.targets.readers.reader import Reader
from mmspec.training.conversations import Question
from mmspec.training.reporting import Report, silent

SIDE_BY_SIDE = 16  # robots that act in one batch


class PolicyTeacher:
    """Asks a policy what it does at the moments of a data set: as many tokens as it has parts."""

    def __init__(self, source: str, model: Any, **options: Any) -> None:
        processor = formatting.processor(source, model, sees=True, **options)
        self.plain = accelerate(model, "plain", processor=processor)
        session: Any = self.plain.session
        self.policy: BoundPolicy = session.binder.first()
        self.reader: Reader = session.bound.backbone
        self.words = PromptReader(model, processor)
        self.ends = frozenset[int]()
        self.longest = self.policy.places

    def check(self, questions: Sequence[Question]) -> None:
        """Refuse moments that nobody saw, and conversations. Raises ValueError."""
        for one in questions:
            if not one.pictures or len(one.turns) > 1:
                what = "has no picture" if not one.pictures else "is a conversation"
                raise ValueError(
                    f"{one.place} {what}, and a policy is asked of what its camera sees; give "
                    "moments, an instruction and a picture each"
                )

    def load_media(self, question: Question) -> list[Image.Image]:
        """The pictures of a moment. Raises ValueError naming what cannot be read."""
        return [open_picture(one) for one in question.pictures]

    def inputs(
        self, questions: Sequence[Question], pictures: Sequence[Sequence[Image.Image]]
    ) -> dict[str, Tensor]:
        """What `generate` takes, padded on the left: (B, L) ids and pictures."""
        asked = ["".join(filter(None, one.turns[0].parts)) for one in questions]
        made = self.words.read(pictures, [checked_instruction(one) for one in asked])
        return {name: value.to(self.reader.device) for name, value in made.items()}

    def tokens(self, answer: str) -> list[int]:
        """An action of the data, in the robot's units. Raises ValueError for what is none."""
        space = self.policy.space
        try:
            said = [float(one) for one in answer.replace(",", " ").split()]
        except ValueError:
            said = []
        if len(said) != self.policy.places or not np.isfinite(said).all():
            raise ValueError(
                f"the answer {answer!r} is no action; give {self.policy.places} numbers, or leave "
                "answers to the policy"
            )
        rows = torch.tensor(said, dtype=torch.float64).view(-1, space.size)
        found: list[int] = space.tokens(space.normalise(rows)).flatten().tolist()
        return found


def names_environment(data: str) -> bool:
    """Whether data are episodes of its own, "WORLD:COUNT"."""
    return data.partition(":")[0] in WORLDS and not Path(data).exists()


def record_episodes(
    data: str, teacher: PolicyTeacher, folder: Path, seed: int, progress: Report = silent
) -> Path:
    """A file of moments of episodes "WORLD:COUNT" that the policy plays, greedily, into a folder.

    One that lies there is not made again. Raises ValueError for what is no number of episodes.
    """
    world, _, said = data.partition(":")
    if not said.isdigit() or int(said) < 2:
        raise ValueError(f"--data {data} says no number of episodes; give {world}:64, for example")
    count = int(said)
    file = folder / f"{world}-{count}-{seed}.jsonl"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    for first in range(0, count, SIDE_BY_SIDE):
        own = range(first, min(first + SIDE_BY_SIDE, count))
        worlds = [make_world(world) for _ in own]
        done: Any = teacher.plain.rollout(worlds, seed=seed, episode=seed * count + first)
        for number, episode in zip(own, done, strict=True):
            rows += _moments(episode, teacher.policy.chunk, folder, number)
        progress("episodes", own.stop, count, float("nan"))
    part = file.with_suffix(".part")
    part.write_text("".join(rows), encoding="utf-8")
    part.replace(file)
    return file


def _moments(episode: Rollout, chunk: int, folder: Path, number: int) -> list[str]:
    """Rows of an episode's questions, their pictures written beside."""
    rows = []
    for at, words in enumerate(episode.instructions):
        name = f"{number}-{at}.png"
        Image.fromarray(episode.images[at * chunk]).save(folder / name)
        rows.append(json.dumps({"prompt": words, "image": name}) + "\n")
    return rows


skeleton = formatting.skeleton
teacher = PolicyTeacher
