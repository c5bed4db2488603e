"""Evaluate a checkpoint: facts right on held-out scenes, and acceptance length of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.zoo.language import Example, format_prompt, scenes, score, write
from tools.zoo.vlm.batches import IGNORED, Encoder, Renderer, Sample, render_plain
from tools.zoo.vlm.distillation import MAX_NEW_TOKENS, generate_responses
from tools.zoo.vlm.drawings import sample_drawing
from tools.zoo.vlm.training import logits_of


def generate_texts(
    model: PreTrainedModel, processor: Any, examples: Sequence[Example], batch: int = 32
) -> list[str]:
    """Generate texts greedily with the model's own processor."""
    texts: list[str] = []
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
        texts += processor.batch_decode(new, skip_special_tokens=True)
    return texts


def facts_right(
    model: PreTrainedModel, processor: Any, examples: Sequence[Example]
) -> tuple[int, int]:
    """Return (facts right, facts required), summed over examples."""
    texts = generate_texts(model, processor, examples)
    pairs = [score(e, text) for e, text in zip(examples, texts, strict=True)]
    return sum(right for right, _ in pairs), sum(total for _, total in pairs)


def sample_drawings(n: int, seed: int = 0) -> list[Example]:
    """Return `n` held-out flat drawings, with a caption prompt."""
    generator = np.random.default_rng((seed, 8))
    found: list[Example] = []
    for picture, scene in (sample_drawing(generator) for _ in range(n)):
        found.append(Example(Image.fromarray(picture), "describe the picture.", "", scene))
    return found


@torch.no_grad()
def acceptance(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    encoder: Encoder,
    n: int,
    k: int = 5,
    renderer: Renderer = render_plain,
) -> float:
    """Return the mean acceptance length on `n` held-out prompts with greedy target answers."""
    samples = []
    for one, number in scenes(n, "held-out", seed=1):
        picture, scene = renderer(one, np.random.default_rng((number, 10)))
        prompt, answer, _ = write(scene, number)
        samples.append(Sample(picture, prompt, answer))
    tokens, rounds = 0.0, 0.0
    for sample in generate_responses(target, encoder, samples):
        batch = encoder([sample])
        picks = logits_of(drafter, encoder.family, batch)[0, :-1].argmax(-1)
        is_answer = batch.labels[0, 1:] != IGNORED
        follows = (picks == batch.ids[0, 1:])[is_answer]
        tokens += len(follows)
        rounds += len(follows) / acceptance_length(follows, k)
    return round(tokens / max(rounds, 1.0), 2)


def acceptance_length(follows: Tensor, k: int = 5) -> float:
    """Return tokens per round of greedy chain speculation with `k` draft tokens.

    follows: (L,) bool, whether the drafter, given the target's tokens, predicts the target's next
    token. A greedy chain is accepted up to its first miss, so this determines the rounds.
    """
    hits = follows.tolist()
    position, rounds = 0, 0
    while position < len(hits):
        run = hits[position : position + k]
        position += (run.index(False) if False in run else len(run)) + 1
        rounds += 1
    return len(hits) / max(rounds, 1)
