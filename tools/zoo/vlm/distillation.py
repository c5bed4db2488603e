"""Distillation data: answers of a target to prompts about training scenes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from mmspec.training.fitting import TrainingRun
from tools.zoo.vlm.batches import (
    Batch,
    Encoder,
    Renderer,
    Sample,
    group_by_length,
    iterate_samples,
    render_plain,
)

MAX_NEW_TOKENS = 96
_BATCH = 128
_SAMPLED_ONE_IN = 4  # the others are greedy


def sample_target_responses(
    target: PreTrainedModel,
    encoder: Encoder,
    n: int,
    course: TrainingRun,
    renderer: Renderer = render_plain,
) -> list[Sample]:
    """Return `n` training samples with answers of the target; one batch in four is sampled."""
    batches = -(-n // _BATCH)
    found: list[Sample] = []
    for i, samples in enumerate(
        islice(iterate_samples(_BATCH, course.seed + 1, renderer), batches)
    ):
        is_sampled = i % _SAMPLED_ONE_IN == _SAMPLED_ONE_IN - 1
        found += generate_responses(target, encoder, samples, is_sampled)
        course.progress("listen", i + 1, batches, float("nan"))
    return found[:n]


def iterate_batches(
    answers: Sequence[Sample],
    encoder: Encoder,
    batch: int,
    seed: int,
    renderer: Renderer = render_plain,
    blind: bool = False,
) -> Iterator[Batch]:
    """Iterate over batches without end: the target's answers, alternating with new scenes.

    Half of the batches of a blind model have a single image token.
    """
    generator = np.random.default_rng((seed, 3))
    new_samples = iterate_samples(batch, seed + 2, renderer)
    while True:
        for part in group_by_length(answers, batch, generator):
            yield encoder(part, blind=blind and generator.random() < 0.5)
            yield encoder(next(new_samples), blind=blind and generator.random() < 0.5)


@torch.no_grad()
def generate_responses(
    target: PreTrainedModel, encoder: Encoder, samples: Sequence[Sample], sampled: bool = False
) -> list[Sample]:
    """Return the samples with the target's answers, greedy or sampled."""
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
