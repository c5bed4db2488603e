"""What a training is going to take, before any weight is loaded: `mmspec train --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from mmspec.cli.taught import beginning
from mmspec.training.conversations import Question
from mmspec.training.feature_size import cache_bytes, wanted_features

PROBED = 32  # questions that are tokenised to say how long prompts are


def cost(asked: Any, recipe: Any, teacher: Any, questions: Sequence[Question]) -> dict[str, Any]:
    """Parameters, memory in GiB and volume of data; tokens of prompts are measured on some rows.

    Memory: the target, the head's weights, gradients and AdamW's two averages in float32, and what
    a batch of the longest samples holds in states, memory of the target and three rows of logits
    for each token of the answers. Layers' own activations are not in it.
    """
    reader = teacher.reader
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    head = beginning(recipe, reader, counts, asked.head, asked.knobs, asked.seed)
    size = sum(one.numel() for one in head.parameters())
    target = sum(one.numel() for one in reader.model.parameters())
    each = torch.empty((), dtype=reader.model.dtype).element_size()
    prompts, broken = _lengths(teacher, questions)
    answers = len(questions) * asked.max_new_tokens
    longest = min(asked.max_length, max(prompts, default=0) + asked.max_new_tokens)
    copies = 16 + (4 if asked.ema else 0)
    width, layers = int(reader.config.hidden_size), int(reader.config.num_hidden_layers)
    read = asked.batch * longest * width * (8 + 2 * layers * each)
    said = asked.batch * asked.max_new_tokens * reader.vocabulary * 12
    mean = sum(prompts) / max(len(prompts), 1)
    stored: dict[str, Any] = {}
    if recipe.training.reads_states or asked.cache is not None:
        tap = "hidden" if asked.cache is None else wanted_features(recipe.training, reader, head)
        size_on_disk = cache_bytes(reader, tap, [(mean * len(questions), answers)])
        name = "states of the target, not stored, GiB"
        name = name if asked.cache is None else "feature cache, at most about, GiB"
        stored[name] = size_on_disk / 2**30
    return {
        "recipe": recipe.name,
        "head parameters": size,
        "target parameters": target,
        "memory of the target, GiB": target * each / 2**30,
        "memory of the head, GiB": size * copies / 2**30,
        "memory of a batch, about, GiB": (read + said) / 2**30,
        "checkpoint, GiB": size * (copies - 4) / 2**30,
        "questions": len(questions),
        "pictures": len({picture for one in questions for picture in one.pictures}),
        "tokens of a prompt, mean and most": [mean, max(prompts, default=0)],
        "measured on, unreadable": [len(prompts), broken],
        "tokens of answers, at most": answers,
        **stored,
        "passes over the data": asked.steps * asked.batch * asked.accumulate / len(questions),
    }


def _lengths(teacher: Any, questions: Sequence[Question]) -> tuple[list[int], int]:
    """Tokens of some prompts, evenly spread, and how many of these cannot be read."""
    found, broken = [], 0
    step = max(1, len(questions) // PROBED)
    for question in islice(questions, 0, None, step):
        try:
            opened = teacher.load_media(question)
        except ValueError:
            broken += 1
            continue
        found.append(int(teacher.inputs([question], [opened])["input_ids"].shape[1]))
    return found, broken
