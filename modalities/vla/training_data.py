"""Training data of draft models for policies: observations with instructions.

A row is {"prompt": "reach the red cube", "image": "0-3.png"}, with "images" for several cameras;
its optional answer is the action in the robot's units, "0.01 -0.02 ...". Data can also be recorded
from episodes of the policy itself.
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
from mmspec.modalities.common.formatting import open_image
from mmspec.modalities.vla.inputs import PromptReader, check_instruction
from mmspec.modalities.vla.prediction import BoundPolicy
from mmspec.modalities.vla.rollout import Rollout
from mmspec.modalities.vla.worlds import WORLDS, make_world
from mmspec.targets.readers.reader import Reader
from mmspec.training.conversations import Question
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.training.media import Media

NUM_PARALLEL = 16  # robots in one batch


class PolicyTeacher:
    """Requests actions of a policy for the observations of a data set."""

    def __init__(self, source: str, model: Any, **options: Any) -> None:
        processor = formatting.load_processor(source, model, sees=True, **options)
        self.plain = accelerate(model, "plain", processor=processor)
        session: Any = self.plain.session
        self.policy: BoundPolicy = session.binder.bind_default()
        self.reader: Reader = session.bound.backbone
        self.prompt_reader = PromptReader(model, processor)
        self.end_ids = frozenset[int]()
        self.max_answer_tokens = self.policy.num_tokens

    def check(self, questions: Sequence[Question]) -> dict[int, str]:
        """Raises ValueError for rows without an image, with a clip, and for conversations."""
        for one in questions:
            if not one.images or one.videos or len(one.turns) > 1:
                problem = "is a conversation" if len(one.turns) > 1 else "has no picture, or a clip"
                raise ValueError(
                    f"{one.place} {problem}; a policy needs an instruction and a picture per row"
                )
        return {}

    def load_media(self, question: Question) -> list[Image.Image]:
        """The images of a row. Raises ValueError naming what cannot be read."""
        return [open_image(one.source(), one.name) for one in question.images]

    def inputs(
        self, questions: Sequence[Question], pictures: Sequence[Sequence[Image.Image]]
    ) -> dict[str, Tensor]:
        """Inputs of `generate`: ids (B, L), padded on the left, and images."""
        prompts = [one.turns[0].text for one in questions]
        made = self.prompt_reader.read(pictures, [check_instruction(one) for one in prompts])
        return {name: value.to(self.reader.device) for name, value in made.items()}

    def tokens(self, answer: str) -> list[int]:
        """Encode an action in the robot's units. Raises ValueError for what is none."""
        space = self.policy.space
        try:
            values = [float(one) for one in answer.replace(",", " ").split()]
        except ValueError:
            values = []
        if len(values) != self.policy.num_tokens or not np.isfinite(values).all():
            raise ValueError(
                f"the answer {answer!r} is not an action; give {self.policy.num_tokens} "
                "numbers, or "
                "drop answers to use the policy's own actions"
            )
        rows = torch.tensor(values, dtype=torch.float64).view(-1, space.size)
        found: list[int] = space.encode(space.normalise(rows)).flatten().tolist()
        return found

    def text(self, tokens: Sequence[int]) -> str:
        """Raises ValueError: actions are no text."""
        raise ValueError("the answers of a policy are actions, and no endpoint chats in these")


def check_media(media: Media) -> None:
    """Raises ValueError for an image that cannot be read."""
    open_image(media.source(), media.name)


def names_environment(data: str) -> bool:
    """Whether data name episodes to record, "WORLD:COUNT"."""
    return data.partition(":")[0] in WORLDS and not Path(data).exists()


def record_episodes(
    data: str, teacher: PolicyTeacher, folder: Path, seed: int, progress: TrainingProgress = silent
) -> Path:
    """Record greedy episodes "WORLD:COUNT" of the policy to a file in a folder.

    An existing file is reused. Raises ValueError for a bad number of episodes.
    """
    world, _, number_given = data.partition(":")
    if not number_given.isdigit() or int(number_given) < 2:
        raise ValueError(f"--data {data} has no number of episodes; give {world}:64, for example")
    count = int(number_given)
    file = folder / f"{world}-{count}-{seed}.jsonl"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    for first in range(0, count, NUM_PARALLEL):
        own = range(first, min(first + NUM_PARALLEL, count))
        worlds = [make_world(world) for _ in own]
        done: Any = teacher.plain.rollout(worlds, seed=seed, episode=seed * count + first)
        for number, episode in zip(own, done, strict=True):
            rows += _write_moments(episode, teacher.policy.chunk, folder, number)
        progress("episodes", own.stop, count, float("nan"))
    part = file.with_suffix(".part")
    part.write_text("".join(rows), encoding="utf-8")
    part.replace(file)
    return file


def _write_moments(episode: Rollout, chunk: int, folder: Path, number: int) -> list[str]:
    """Rows of the requests of an episode; writes their images to the folder."""
    rows = []
    for at, words in enumerate(episode.instructions):
        name = f"{number}-{at}.png"
        Image.fromarray(episode.images[at * chunk]).save(folder / name)
        rows.append(json.dumps({"prompt": words, "image": name}) + "\n")
    return rows


skeleton = formatting.skeleton_of_config
teacher = PolicyTeacher
