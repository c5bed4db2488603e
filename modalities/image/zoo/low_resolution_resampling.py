"""Teach a resampler what the codes of the target are for the codes of a small picture, and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from einops import repeat
from torch import Tensor, nn
from torch.nn import functional

from mmspec.codes.codebook import Codebook
from mmspec.codes.resampling import marked
from mmspec.laws.sampling import guide
from mmspec.modalities.image.zoo.coding import coded, pictures, scattered
from mmspec.modalities.image.zoo.distil import apart, watched
from mmspec.modalities.image.zoo.evaluate import drawn_codes
from mmspec.modalities.image.zoo.low_resolution_coding import SKETCH, kinds
from mmspec.modalities.image.zoo.models import GUIDANCE, SIDE
from mmspec.modalities.image.zoo.training import busy_scenes
from mmspec.models.code_resampler import CodeResampler, CodeResamplerConfig
from mmspec.zoo.fitting import fit
from mmspec.zoo.learning import Progress, silent
from mmspec.zoo.prompts import prompt
from mmspec.zoo.scene import BOARD

_NUMBERS = 1 << 49  # scenes come from seeds of their own
_BLANKS = 0.15  # how many codes of blank places are learnt: most are blank, and easily told
_AT_ONCE = 64
_FULL = 4  # things in pictures to learn the target's laws from
_MISLED = 0.05  # how often a small code is a wrong one: the target may draw something else


@dataclass(frozen=True)
class Sizes:
    """Codes (n, 3, 3) and (n, 9, 9) of the same pictures, and the target's logits where known."""

    small: Tensor
    large: Tensor
    logits: Tensor | None = None  # (n, 81, K)

    def at(self, picks: Tensor) -> Sizes:
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
    model: CodeResampler,
    seen: Sizes,
    steps: int,
    rate: float,
    seed: int,
    progress: Progress = silent,
    batch: int = 64,
) -> None:
    """Train both ways on pictures; on the target's laws where they are known.

    What is learnt depends on nothing that the resampler does not see, or its laws would be biased.
    """

    def loss_of(item: Sizes) -> Tensor:
        back = model.down(item.large).flatten(0, -2)
        missed = functional.cross_entropy(back, item.small.flatten())
        small = misled(item.small, model.config.coarse)
        taught = repeat(small > 0, "b h w -> b (h r) (w c)", r=SIDE // BOARD, c=SIDE // BOARD)
        taught = taught | (torch.rand(taught.shape) < _BLANKS)
        logits = model.told(near_all(model, small, item.large)[taught])
        if item.logits is None:
            return functional.cross_entropy(logits, item.large[taught]) + missed
        wanted = item.logits.unflatten(1, (SIDE, SIDE))[taught]
        return apart(wanted.float(), logits) + missed

    inner = ("enter.weight", "think.weight", "gather.weight")
    matrices = [p for name, p in model.named_parameters() if name in inner]
    others = [p for name, p in model.named_parameters() if name not in inner]
    taught = _shuffled(seen, min(batch, len(seen.small)), seed)
    stage = "enlarge" if seen.logits is None else "follow"
    model.train()
    fit(others, taught, loss_of, steps, rate, stage, progress, matrices)
    model.train(False)


def near_all(model: CodeResampler, small: Tensor, large: Tensor) -> Tensor:  # -> (B, 9, 9, F)
    """What is near every large code."""
    rows = torch.arange(BOARD)
    return torch.cat([model.near(small, large, row.expand(len(small))) for row in rows], 1)


def misled(small: Tensor, count: int) -> Tensor:
    """Small codes, a few of them wrong."""
    wrong = torch.rand(small.shape) < _MISLED
    return torch.where(wrong, torch.randint(count, small.shape), small)


def coded_scenes(coder: Any, n: int, seed: int, progress: Progress = silent) -> Sizes:
    """Pictures of full scenes as the target codes them, beside the kinds of what they show."""
    generator = np.random.default_rng((seed, 16))
    scenes = list(islice(scattered(_NUMBERS + (seed << 24), generator, BOARD * BOARD), n))
    parts = []
    for start in range(0, n, _AT_ONCE):
        parts.append(coded(coder, pictures(scenes[start : start + _AT_ONCE])))
        progress("encode", min(n, start + _AT_ONCE), n, 0.0)
    return Sizes(_small(kinds(scenes)), torch.cat(parts).unflatten(1, (SIDE, SIDE)))


@torch.no_grad()
def drawn_scenes(
    model: CodeResampler,
    target: Any,
    processor: Any,
    n: int,
    seed: int,
    progress: Progress = silent,
) -> Sizes:
    """Pictures that the target draws, with its guided laws of their codes.

    Prompts name many things, as every one of them teaches. What was drawn is told by the
    down-sampler, which has learnt to by now.
    """
    scenes = list(islice((s for s in busy_scenes(seed) if len(s.things) >= _FULL), n))
    large, laws = [], []
    for start in range(0, n, _AT_ONCE):
        texts = [prompt(scene) for scene in scenes[start : start + _AT_ONCE]]
        drawn = drawn_codes(target, processor, texts, seed + start)
        told = watched(target, processor, texts, drawn).logits.float()
        laws.append(guide(told[:, 0], told[:, 1], GUIDANCE).half())
        large.append(drawn)
        progress("watch", min(n, start + _AT_ONCE), n, 0.0)
    whole = torch.cat(large).unflatten(1, (SIDE, SIDE))
    small: Tensor = model.down(whole).argmax(-1)
    return Sizes(small, whole, torch.cat(laws))


def _small(codes: Tensor) -> Tensor:  # (n, 9) -> (n, 3, 3)
    grid: Tensor = codes.unflatten(1, (SKETCH.side, SKETCH.side))
    return grid


def _shuffled(seen: Sizes, batch: int, seed: int) -> Iterator[Sizes]:
    generator = np.random.default_rng((seed, 15))
    while True:
        for picks in generator.permutation(len(seen.small)).reshape(-1, batch):
            yield seen.at(torch.from_numpy(picks))
