"""Train a resampler from the codes of a low-resolution image to the target's codes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.codes.codebook import Codebook
from mmspec.codes.resampling import compute_mark
from mmspec.distributions.sampling import guide
from mmspec.models.code_resampler import CodeResampler, CodeResamplerConfig
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, iterate_chunks, shuffle_batches
from mmspec.zoo.prompts import write_prompt
from mmspec.zoo.scene import BOARD, add_tiles
from tools.zoo.image.coding import sample_scenes
from tools.zoo.image.distil import compute_target_logits, mean_divergence
from tools.zoo.image.evaluate import generate_codes
from tools.zoo.image.low_resolution_coding import encode_kinds
from tools.zoo.image.models import GUIDANCE, SIDE
from tools.zoo.image.training import encode_scenes, sample_training_scenes

_NUMBERS = 1 << 49  # first scene seed, different for every stage
_AT_ONCE = 64
_MIN_THINGS = 4  # in the images on which the target's distributions are distilled
_CORRUPTED = 0.05  # share of wrong small codes: the target may generate something else


@dataclass(frozen=True)
class ResolutionPairs:
    """Codes (n, 3, 3) and (n, 9, 9) of the same images, and optionally the target's logits."""

    small: Tensor
    large: Tensor
    logits: Tensor | None = None  # (n, 81, K)

    def at(self, picks: np.ndarray) -> ResolutionPairs:
        """Select examples."""
        logits = None if self.logits is None else self.logits[picks]
        return ResolutionPairs(self.small[picks], self.large[picks], logits)


def build_resampler(fine: Codebook, coarse: Codebook) -> CodeResampler:
    """An untrained resampler between the codes of the target and those of the small model."""
    config = CodeResamplerConfig(ratio=SIDE // BOARD, fine=fine.size, coarse=coarse.size)
    model = CodeResampler(config)
    model.fine_mark.copy_(compute_mark(fine))
    model.coarse_mark.copy_(compute_mark(coarse))
    _init_from_codebook(model.large, fine)
    _init_from_codebook(model.small, coarse)
    return model


@torch.no_grad()
def _init_from_codebook(table: nn.Embedding, book: Codebook) -> None:
    """Initialise embeddings from the codebook, so that similar codes have similar embeddings."""
    vectors = book.vectors.detach().float()
    vectors = vectors / vectors.std()
    width = min(vectors.shape[1], table.embedding_dim)
    table.weight[: book.size, :width] = vectors[:, :width]


def train_resampler(
    model: CodeResampler,
    data: ResolutionPairs,
    decay: CosineDecay,
    run: TrainingRun,
    batch: int = 64,
) -> None:
    """Train both directions on images; on the target's distributions if they are given.

    Labels depend only on inputs of the resampler; otherwise its distributions would be biased.
    """

    def loss_of(item: ResolutionPairs) -> Tensor:
        back = model.down(item.large).flatten(0, -2)
        error = functional.cross_entropy(back, item.small.flatten())
        small = corrupt_codes(item.small, model.config.coarse)
        logits = model.predict(gather_neighbours(model, small, item.large)).flatten(0, 2)
        if item.logits is None:
            return functional.cross_entropy(logits, item.large.flatten()) + error
        return mean_divergence(item.logits.float().flatten(0, 1), logits) + error

    inner = ("enter.weight", "think.weight", "gather.weight")
    matrices = [p for name, p in model.named_parameters() if name in inner]
    others = [p for name, p in model.named_parameters() if name not in inner]
    count, generator = len(data.small), np.random.default_rng((run.seed, 15))
    items = map(data.at, shuffle_batches(count, min(batch, count), generator))
    stage = "enlarge" if data.logits is None else "follow"
    model.train()
    fit(others, items, loss_of, decay, stage, run, matrices)
    model.train(False)


def gather_neighbours(
    model: CodeResampler, small: Tensor, large: Tensor
) -> Tensor:  # -> (B, 9, 9, F)
    """The neighbourhood features of every large code."""
    rows = torch.arange(BOARD)
    return torch.cat(
        [model.gather_context(small, large, row.expand(len(small))) for row in rows], 1
    )


def corrupt_codes(small: Tensor, count: int) -> Tensor:
    """Replace a few small codes by random ones."""
    wrong = torch.rand(small.shape) < _CORRUPTED
    return torch.where(wrong, torch.randint(count, small.shape), small)


def encode_scene_pairs(coder: Any, n: int, run: TrainingRun) -> ResolutionPairs:
    """The target's codes of rendered scenes, paired with the kinds of their things."""
    generator = np.random.default_rng((run.seed, 16))
    source = sample_scenes(_NUMBERS + (run.seed << 24), generator, BOARD**2)
    scenes = [add_tiles(scene, generator) for scene in islice(source, n)]
    large = encode_scenes(coder, scenes, run).unflatten(1, (SIDE, SIDE))
    return ResolutionPairs(encode_kinds(scenes).unflatten(1, (BOARD, BOARD)), large)


@torch.no_grad()
def generate_scene_pairs(
    model: CodeResampler, target: Any, processor: Any, n: int, run: TrainingRun
) -> ResolutionPairs:
    """Images that the target generates, with its guided distributions of their codes.

    Prompts name at least `_MIN_THINGS` things. The small codes come from the trained down-sampler.
    """
    scenes = list(
        islice((s for s in sample_training_scenes(run.seed) if len(s.things) >= _MIN_THINGS), n)
    )
    large, distributions = [], []
    for index, part in enumerate(iterate_chunks(scenes, _AT_ONCE, "watch", run.progress)):
        texts = [write_prompt(scene) for scene in part]
        codes = generate_codes(target, processor, texts, run.seed + index * _AT_ONCE)
        logits = compute_target_logits(target, processor, texts, codes).logits.float()
        distributions.append(guide(logits[:, 0], logits[:, 1], GUIDANCE).half())
        large.append(codes)
    whole = torch.cat(large).unflatten(1, (SIDE, SIDE))
    small: Tensor = model.down(whole).argmax(-1)
    return ResolutionPairs(small, whole, torch.cat(distributions))
