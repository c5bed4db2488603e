"""Let a target talk about training scenes, so that a drafter can learn the target's own words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mmspec.training.fitting import Course
from tools.zoo.vlm.batches import (
    Batch,
    Encoder,
    Looks,
    Sample,
    fresh,
    grouped,
    plainly,
)

MAX_NEW_TOKENS = 96
_AT_ONCE = 128
_SAMPLED_ONE_IN = 4  # the others are greedy


def said_by(
    target: PreTrainedModel, encoder: Encoder, n: int, course: Course, looks: Looks = plainly
) -> list[Sample]:
    """`n` training samples, each with what the target answers; one batch in four is sampled."""
    batches = -(-n // _AT_ONCE)
    found: list[Sample] = []
    for i, samples in enumerate(islice(fresh(_AT_ONCE, course.seed + 1, looks), batches)):
        is_sampled = i % _SAMPLED_ONE_IN == _SAMPLED_ONE_IN - 1
        found += answered(target, encoder, samples, is_sampled)
        course.progress("listen", i + 1, batches, float("nan"))
    return found[:n]


def lessons(
    said: Sequence[Sample],
    encoder: Encoder,
    batch: int,
    seed: int,
    looks: Looks = plainly,
    blind: bool = False,
) -> Iterator[Batch]:
    """Batches without end: the target's words, over and over, alternating with fresh scenes.

    A blind model reads one image token as often as all of them.
    """
    generator = np.random.default_rng((seed, 3))
    news = fresh(batch, seed + 2, looks)
    while True:
        for part in grouped(said, batch, generator):
            yield encoder(part, blind=blind and generator.random() < 0.5)
            yield encoder(next(news), blind=blind and generator.random() < 0.5)


@torch.no_grad()
def answered(
    target: PreTrainedModel, encoder: Encoder, samples: Sequence[Sample], sampled: bool = False
) -> list[Sample]:
    """The same pictures and prompts with what the target answers, greedily or sampled."""
    family, (ids, mask) = encoder.family, encoder.prompts(samples)
    images = family.image_inputs(np.stack([s.image for s in samples]))
    extra = {}
    if family.positions_from_types:
        token = encoder.tokenizer.convert_tokens_to_ids(family.image_token)
        extra["mm_token_type_ids"] = (ids == token).int()
    generate: Any = target.generate
    out = generate(
        input_ids=ids,
        attention_mask=mask,
        **images,
        **extra,
        do_sample=sampled,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    texts = encoder.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return [replace(s, answer=text) for s, text in zip(samples, texts, strict=True)]
