"""The plan of a training: options, checks, and its cost (`mmspec train --dry-run`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mmspec import recipes
from mmspec.cli.training_examples import initial_head
from mmspec.errors import check_number
from mmspec.recipe import Recipe
from mmspec.training.conversations import Question
from mmspec.training.endpoint import ChatEndpoint
from mmspec.training.feature_size import cache_bytes, required_features
from mmspec.training.processes import Processes

PROBED = 32  # questions that are tokenised to measure prompt lengths


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command; None = as the recipe has it."""

    recipe: str
    target: str
    data: Path
    out: Path
    images: Path | None = None
    image_root: tuple[Path, ...] = ()
    allow_urls: bool = False
    max_bad_rows: int = 0
    answers: str = "target"
    endpoint: str | None = None
    endpoint_model: str | None = None
    endpoint_timeout: float = 300.0
    concurrency: int = 8
    head: Path | None = None
    cache: Path | None = None
    steps: int = 2000
    batch: int = 8
    accumulate: int = 1
    rate: float | None = None
    ema: float = 0.0
    bf16: bool = False
    muon: bool = False
    held_out: int = 32
    every: int = 100
    max_new_tokens: int = 128
    max_length: int = 2048
    temperature: float = 0.0
    seed: int = 0
    knobs: tuple[str, ...] = ()
    threads: int | None = None
    trust_remote_code: bool = False
    dry_run: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for rates and temperatures that are infinite or NaN."""
        for name in ("rate", "ema", "temperature"):
            if getattr(self, name) is not None:
                check_number(f"--{name}", getattr(self, name), 0, example=1e-3)
        if self.endpoint is not None and self.answers == "data":
            raise ValueError(
                f"--endpoint {self.endpoint} answers in place of the target, and --answers data "
                "takes the answers of the data; drop one of them"
            )
        self.chat_endpoint()

    def chat_endpoint(self) -> ChatEndpoint | None:
        """Where the target answers; None = in this process. Raises ValueError for no address."""
        if self.endpoint is None:
            return None
        return ChatEndpoint(self.endpoint, self.endpoint_model, self.endpoint_timeout)


def get_trainable(name: str) -> Recipe:
    """A recipe whose drafter can be trained. Raises ValueError naming those that can be."""
    recipe = recipes.get(name)
    if recipe.training is None:
        able = [one for one in recipes.names("tokens") if recipes.get(one).training is not None]
        raise ValueError(
            f"recipe {name!r} has no drafter that `mmspec train` can train; choose one of "
            f"{', '.join(able)}"
        )
    return recipe


def check_share(options: TrainOptions, processes: Processes) -> None:
    """Refuse options that several processes cannot share. Raises ValueError."""
    if options.accumulate % processes.count:
        raise ValueError(
            f"--accumulate {options.accumulate} batches a step cannot be shared evenly by "
            f"{processes.count} processes; give a multiple of {processes.count}"
        )


def estimate_cost(
    options: Any, recipe: Any, teacher: Any, questions: Sequence[Question]
) -> dict[str, Any]:
    """Parameters, memory in GiB and volume of data; tokens of prompts are measured on some rows.

    Memory: the target, the head's weights, gradients and AdamW's two averages in float32, and what
    a batch of the longest samples holds in states, memory of the target and three rows of logits
    for each token of the answers. Layers' own activations are not in it.
    """
    reader = teacher.reader
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    head = initial_head(recipe, reader, counts, options.head, options.knobs, options.seed)
    size = sum(one.numel() for one in head.parameters())
    target = sum(one.numel() for one in reader.model.parameters())
    each = torch.empty((), dtype=reader.model.dtype).element_size()
    prompts, broken = _lengths(teacher, questions)
    answers = len(questions) * options.max_new_tokens
    longest = min(options.max_length, max(prompts, default=0) + options.max_new_tokens)
    copies = 16 + (4 if options.ema else 0)
    width, layers = int(reader.config.hidden_size), int(reader.config.num_hidden_layers)
    read = options.batch * longest * width * (8 + 2 * layers * each)
    logits = options.batch * options.max_new_tokens * reader.vocabulary * 12
    mean = sum(prompts) / max(len(prompts), 1)
    stored: dict[str, Any] = {}
    if recipe.training.reads_states or options.cache is not None:
        tap = (
            "hidden" if options.cache is None else required_features(recipe.training, reader, head)
        )
        size_on_disk = cache_bytes(reader, tap, [(mean * len(questions), answers)])
        name = "states of the target, not stored, GiB"
        name = name if options.cache is None else "feature cache, at most about, GiB"
        stored[name] = size_on_disk / 2**30
    return {
        "recipe": recipe.name,
        "head parameters": size,
        "target parameters": target,
        "memory of the target, GiB": target * each / 2**30,
        "memory of the head, GiB": size * copies / 2**30,
        "memory of a batch, about, GiB": (read + logits) / 2**30,
        "checkpoint, GiB": size * (copies - 4) / 2**30,
        "questions": len(questions),
        "pictures": len({picture for one in questions for picture in one.images}),
        "tokens of a prompt, mean and most": [mean, max(prompts, default=0)],
        "measured on, unreadable": [len(prompts), broken],
        "tokens of answers, at most": answers,
        **stored,
        "passes over the data": options.steps * options.batch * options.accumulate / len(questions),
    }


def _lengths(teacher: Any, questions: Sequence[Question]) -> tuple[list[int], int]:
    """Tokens of some prompts, evenly spread, and how many of these cannot be read."""
    found, broken = [], 0
    step = max(1, len(questions) // PROBED)
    for question in islice(questions, 0, None, step):
        try:
            media = teacher.load_media(question)
        except ValueError:
            broken += 1
            continue
        found.append(int(teacher.inputs([question], [media])["input_ids"].shape[1]))
    return found, broken
