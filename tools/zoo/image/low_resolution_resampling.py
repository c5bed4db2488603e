"""Teach a resampler what the codes of the target are for the codes of a small picture, and back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.codes.codebook import Codebook
from mmspec.codes.resampling import marked
from mmspec.distributions.sampling import guide
from mmspec.models.code_resampler import CodeResampler, CodeResamplerConfig
from mmspec.training.fitting import Course, Fall, chunks, fit, shuffled
from mmspec.zoo.prompts import prompt
from mmspec.zoo.scene import BOARD, tiled
from tools.zoo.image.coding import scattered
from tools.zoo.image.distil import apart, watched
from tools.zoo.image.evaluate import drawn_codes
from tools.zoo.image.low_resolution_coding import kinds
from tools.zoo.image.models import GUIDANCE, SIDE
from tools.zoo.image.training import busy_scenes, encoded

_NUMBERS = 1 << 49  # scenes come from seeds of their own
_AT_ONCE = 64
_FULL = 4  # things in pictures to learn the target's distributions from
_MISLED = 0.05  # how often a small code is a wrong one: the target may draw something else


@dataclass(frozen=True)
class Sizes:
    """Codes (n, 3, 3) and (n, 9, 9) of the same pictures, and the target's logits where known."""

    small: Tensor
    large: Tensor
    logits: Tensor | None = None  # (n, 81, K)

    def at(self, picks: np.ndarray) -> Sizes:
        """Some of them."""
        logits = None if self.logits is None else self.logits[picks]
        return Sizes(self.small[picks], self.large[picks], logits)


def untrained(fine: Codebook, coarse: Codebook) -> CodeResampler:
    """A resampler between the codes of the target and those of the small model."""
    config = CodeResamplerConfig(ratio=SIDE // BOARD, fine=fine.size, coarse=coarse.size)
    model = CodeResampler(config)
    model.fine_mark.copy_(marked(fine))
    model.coarse_mark.copy_(marked(coarse))
    _begin(model.large, fine)
    _begin(model.small, coarse)
    return model


@torch.no_grad()
def _begin(table: nn.Embedding, book: Codebook) -> None:
    """Let codes that look alike begin alike."""
    vectors = book.vectors.detach().float()
    vectors = vectors / vectors.std()
    width = min(vectors.shape[1], table.embedding_dim)
    table.weight[: book.size, :width] = vectors[:, :width]


def learn_to_enlarge(
    model: CodeResampler, seen: Sizes, fall: Fall, course: Course, batch: int = 64
) -> None:
    """Train both ways on pictures; on the target's distributions where they are known.

    What is learnt depends on nothing that the resampler does not see, or its distributions would be
    biased.
    """

    def loss_of(item: Sizes) -> Tensor:
        back = model.down(item.large).flatten(0, -2)
        missed = functional.cross_entropy(back, item.small.flatten())
        small = misled(item.small, model.config.coarse)
        logits = model.told(near_all(model, small, item.large)).flatten(0, 2)
        if item.logits is None:
            return functional.cross_entropy(logits, item.large.flatten()) + missed
        return apart(item.logits.float().flatten(0, 1), logits) + missed

    inner = ("enter.weight", "think.weight", "gather.weight")
    matrices = [p for name, p in model.named_parameters() if name in inner]
    others = [p for name, p in model.named_parameters() if name not in inner]
    count, generator = len(seen.small), np.random.default_rng((course.seed, 15))
    items = map(seen.at, shuffled(count, min(batch, count), generator))
    stage = "enlarge" if seen.logits is None else "follow"
    model.train()
    fit(others, items, loss_of, fall, stage, course, matrices)
    model.train(False)


def near_all(model: CodeResampler, small: Tensor, large: Tensor) -> Tensor:  # -> (B, 9, 9, F)
    """What is near every large code."""
    rows = torch.arange(BOARD)
    return torch.cat([model.near(small, large, row.expand(len(small))) for row in rows], 1)


def misled(small: Tensor, count: int) -> Tensor:
    """Small codes, a few of them wrong."""
    wrong = torch.rand(small.shape) < _MISLED
    return torch.where(wrong, torch.randint(count, small.shape), small)


def coded_scenes(coder: Any, n: int, course: Course) -> Sizes:
    """Pictures of full scenes as the target codes them, beside the kinds of what they show."""
    generator = np.random.default_rng((course.seed, 16))
    source = scattered(_NUMBERS + (course.seed << 24), generator, BOARD**2)
    scenes = [tiled(scene, generator) for scene in islice(source, n)]
    large = encoded(coder, scenes, course).unflatten(1, (SIDE, SIDE))
    return Sizes(kinds(scenes).unflatten(1, (BOARD, BOARD)), large)


@torch.no_grad()
def drawn_scenes(
    model: CodeResampler, target: Any, processor: Any, n: int, course: Course
) -> Sizes:
    """Pictures that the target draws, with its guided distributions of their codes.

    Prompts name many things, as every one of them teaches. What was drawn is told by the
    down-sampler, which has learnt to by now.
    """
    scenes = list(islice((s for s in busy_scenes(course.seed) if len(s.things) >= _FULL), n))
    large, distributions = [], []
    for turn, part in enumerate(chunks(scenes, _AT_ONCE, "watch", course.progress)):
        texts = [prompt(scene) for scene in part]
        drawn = drawn_codes(target, processor, texts, course.seed + turn * _AT_ONCE)
        told = watched(target, processor, texts, drawn).logits.float()
        distributions.append(guide(told[:, 0], told[:, 1], GUIDANCE).half())
        large.append(drawn)
    whole = torch.cat(large).unflatten(1, (SIDE, SIDE))
    small: Tensor = model.down(whole).argmax(-1)
    return Sizes(small, whole, torch.cat(distributions))
