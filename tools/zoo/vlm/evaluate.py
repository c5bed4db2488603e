"""Measure a checkpoint: facts right on held-out scenes, and how far a drafter follows a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.zoo.language import Example, format_prompt, scenes, score, write
from tools.zoo.vlm.batches import IGNORED, Encoder, Looks, Sample, plainly
from tools.zoo.vlm.distil import MAX_NEW_TOKENS, answered
from tools.zoo.vlm.drawings import drawing
from tools.zoo.vlm.learning import logits_of


def answers(
    model: PreTrainedModel, processor: Any, examples: Sequence[Example], batch: int = 32
) -> list[str]:
    """What the model says, greedily, through its own processor."""
    said: list[str] = []
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        inputs = processor(
            text=[format_prompt(processor, e.prompt) for e in part],
            images=[e.image for e in part],
            padding=True,
            return_tensors="pt",
        )
        generate: Any = model.generate
        ids = generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = ids[:, inputs["input_ids"].shape[1] :]
        said += processor.batch_decode(new, skip_special_tokens=True)
    return said


def facts_right(
    model: PreTrainedModel, processor: Any, examples: Sequence[Example]
) -> tuple[int, int]:
    """Facts right and facts asked over all examples."""
    said = answers(model, processor, examples)
    pairs = [score(e, text) for e, text in zip(examples, said, strict=True)]
    return sum(right for right, _ in pairs), sum(asked for _, asked in pairs)


def drawings(n: int, seed: int = 0) -> list[Example]:
    """`n` flat drawings that nobody learned from, to be described."""
    generator = np.random.default_rng((seed, 8))
    found: list[Example] = []
    for picture, scene in (drawing(generator) for _ in range(n)):
        found.append(Example(Image.fromarray(picture), "describe the picture.", "", scene))
    return found


@torch.no_grad()
def acceptance(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    encoder: Encoder,
    n: int,
    k: int = 5,
    looks: Looks = plainly,
) -> float:
    """Mean acceptance length on `n` held-out prompts, answered greedily by the target."""
    samples = []
    for one, number in scenes(n, "held-out", seed=1):
        picture, scene = looks(one, np.random.default_rng((number, 10)))
        prompt, answer, _ = write(scene, number)
        samples.append(Sample(picture, prompt, answer))
    tokens, rounds = 0.0, 0.0
    for said in answered(target, encoder, samples):
        batch = encoder([said])
        picks = logits_of(drafter, encoder.family, batch)[0, :-1].argmax(-1)
        is_answer = batch.labels[0, 1:] != IGNORED
        follows = (picks == batch.ids[0, 1:])[is_answer]
        tokens += len(follows)
        rounds += len(follows) / acceptance_length(follows, k)
    return round(tokens / max(rounds, 1.0), 2)


def acceptance_length(follows: Tensor, k: int = 5) -> float:
    """Tokens per round of greedy chain speculation with `k` drafted tokens.

    follows: (L,) bool, whether the drafter, reading the target's own words, picks the word the
    target picked. A greedy chain is accepted up to its first miss, so this is all one needs.
    """
    hits = follows.tolist()
    position, rounds = 0, 0
    while position < len(hits):
        run = hits[position : position + k]
        position += (run.index(False) if False in run else len(run)) + 1
        rounds += 1
    return len(hits) / max(rounds, 1)
