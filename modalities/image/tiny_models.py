"""A tiny random image model: images of four codes out of five, guided, few enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from mmspec.accelerated import Accelerated
from mmspec.api import accelerate
from mmspec.bench.frequency import LENGTH, Subject, refuse_fallback
from mmspec.distributions.sampling import guide
from mmspec.draft import Kind, Verifier
from mmspec.modalities.common.tiny_models import random_drafter
from mmspec.modality import Runner, RunResult
from mmspec.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from mmspec.models.loading import random_model
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.enumeration import ancestral_joint
from mmspec.verifiers.enumeration import enumerate_joint as emitted

CODES, SIDE = 5, 2  # as many codes as published trees have branches
CELLS = SIDE**2
SETTINGS: dict[str, Any] = {"guidance": 2.0, "temperature": 1.0}
CLASS = 1


def tiny_model(layers: int = 2, seed: int = 0, side: int = SIDE) -> LlamaGenForImageGeneration:
    """A class-conditional LlamaGen of random wide weights in float32, `side` x `side` codes."""
    picture = {"num_embeddings": CODES, "embed_dim": 4, "latent_channels": 8, "base_channels": 32}
    config = LlamaGenConfig(
        vocab_size=CODES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max(32, side**2 + 8),
        num_classes=3,
        side=side,
        vq_config={**picture, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    )
    model: LlamaGenForImageGeneration = random_model(
        lambda: LlamaGenForImageGeneration(config), seed
    )
    model.set_attn_implementation("sdpa")
    return model


def tiny_pair(plan: Recipe, seed: int, **parts: Any) -> Accelerated:
    """The recipe on a tiny image model, with another one or a head as its draft model.

    Raises ValueError if it cannot be bound to them.
    """
    target = tiny_model(seed=2 * seed)
    if not plan.takes_drafter:
        return accelerate(target, plan, **parts)
    small = random_drafter(plan, target, seed=2 * seed + 1)
    return accelerate(target, plan, drafter=small, **parts)


def class_request(batch: int) -> dict[str, Tensor]:
    """A request for `batch` images of one class."""
    return {"class_ids": torch.full((batch,), CLASS)}


@torch.no_grad()
def guided_distribution(model: Any, prefixes: Tensor) -> Tensor:  # (R, D) -> (R, K) float64
    """Distribution of the next code, by two forwards over the whole sequence without a cache."""
    logits = []
    for number in (CLASS, model.config.num_classes):
        slot = model.model.condition(torch.full((len(prefixes), 1), number))
        embeds = torch.cat((slot, model.model.embed_tokens(prefixes)), 1)
        logits.append(model(inputs_embeds=embeds).logits[:, -1].double())
    return guide(logits[0], logits[1], SETTINGS["guidance"]).softmax(-1)


def distribution_table(model: Any) -> Callable[[tuple[int, ...]], Tensor]:
    """Map every prefix to the distribution of the next code, for the enumeration."""
    found: dict[tuple[int, ...], Tensor] = {}
    for depth in range(CELLS):
        found |= dict(
            zip(product(range(CODES), repeat=depth), _distributions(model, depth), strict=True)
        )
    return found.__getitem__


def joint(model: Any, length: int) -> Tensor:  # (K,) * length
    """The model's distribution of its first `length` codes, by enumeration."""
    mass = torch.ones((), dtype=torch.float64)
    for depth in range(length):
        mass = mass[..., None] * _distributions(model, depth).reshape(*mass.shape, CODES)
    return mass


@dataclass(frozen=True)
class UncachedGreedy(Runner):
    """Greedy codes of a tiny model, without loop, cache or verifier."""

    model: Any

    def run(self, request: Mapping[str, Any], seed: int) -> RunResult:
        codes = torch.zeros(len(request["class_ids"]), 0, dtype=torch.int64)
        for _ in range(CELLS):
            best = guided_distribution(self.model, codes).argmax(-1, keepdim=True)
            codes = torch.cat((codes, best), 1)
        return RunResult(codes.tolist(), codes.numel(), CELLS - 1)


def generation_subject(fast: Accelerated) -> Subject:
    """Guided samples of a tiny model, and its own distribution."""

    def sample(batch: int, first: int, seed: int) -> Tensor:
        rows = list(range(first, first + batch))
        out = fast.generate_images(**class_request(batch), **SETTINGS, seed=seed, row_ids=rows)
        refuse_fallback(out.stats)
        sequences: Tensor = out.sequences
        return sequences[:, :LENGTH]

    return Subject(joint(fast.model, LENGTH), sample)


def distance(plan: Recipe) -> float | None:
    """Total variation distance of one round on an image of four codes, by enumeration.

    Compares the distribution of the image with the target's. The draft is a chain of all but the
    last code from another tiny model. None if the loss does not come from the verifier.
    """
    verifier = plan.verifier
    assert isinstance(verifier, Verifier)  # the recipe must be bound
    if verifier.lossless or plan.gate is not None or Kind.RACE in verifier.kinds[:1]:
        return None
    p, q = distribution_table(tiny_model(seed=0)), distribution_table(tiny_model(layers=1, seed=1))
    found = emitted(p, q, verifier, Tree.chain(CELLS - 1), verifier.kinds[0])
    return float((found - ancestral_joint(p, CELLS)).abs().sum() / 2)


def _distributions(model: Any, depth: int) -> Tensor:  # (K ** depth, K), prefixes in order
    prefixes = torch.tensor(list(product(range(CODES), repeat=depth)), dtype=torch.int64)
    return guided_distribution(model, prefixes.view(CODES**depth, depth))
