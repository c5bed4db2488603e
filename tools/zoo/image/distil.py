"""Distil a drafter on the target's distributions over codes of images sampled from the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmspec.distributions.sampling import guide
from mmspec.modalities.image.families import image_family
from mmspec.targets.readers.guidance import NEGATIVE, SCALE
from mmspec.training.fitting import CosineDecay, TrainingRun, fit, iterate_chunks, shuffle_batches
from mmspec.training.heads import TrainingExample
from mmspec.zoo.prompts import iterate_training_scenes, write_varied_prompt
from tools.zoo.image.evaluate import generate_codes, guidance_branches
from tools.zoo.image.models import GUIDANCE
from tools.zoo.image.training import PromptEncoder, generation_parameters, logits_of

_BRANCHES = 0.2  # loss weight of the two guidance branches, relative to the guided distribution


@dataclass(frozen=True)
class TargetLogits:
    """Prompts, their sampled codes (n, 81) and the target's logits (n, 2, 81, K).

    The logits are conditional and unconditional.
    """

    texts: list[str]
    codes: Tensor
    logits: Tensor

    def at(self, picks: np.ndarray) -> TargetLogits:
        """Select examples."""
        rows = torch.from_numpy(picks)
        return TargetLogits([self.texts[i] for i in picks], self.codes[rows], self.logits[rows])


def generate_target_codes(
    target: Any, processor: Any, n: int, run: TrainingRun, batch: int = 64
) -> tuple[list[str], Tensor]:
    """Prompts of `n` training scenes, and codes (n, 81) that the target generates.

    At temperature 1 and the default guidance.
    """
    seed = run.seed
    generator = np.random.default_rng((seed, 10))
    texts = [
        write_varied_prompt(scene, generator) for scene in islice(iterate_training_scenes(seed), n)
    ]
    chunks = enumerate(iterate_chunks(texts, batch, "watch", run.progress))
    codes = [
        generate_codes(target, processor, part, seed + index * batch) for index, part in chunks
    ]
    return texts, torch.cat(codes)


@torch.no_grad()
def compute_target_logits(
    target: Any, processor: Any, texts: list[str], codes: Tensor, batch: int = 64
) -> TargetLogits:
    """The target's conditional and unconditional logits of codes (n, 81)."""
    reader = PromptEncoder(processor.tokenizer)
    logits = []
    for part, sampled in zip(iterate_chunks(texts, batch), codes.split(batch), strict=True):
        both = [
            logits_of(target, encoded, sampled).half()
            for encoded in guidance_branches(reader, part)
        ]
        logits.append(torch.stack(both, 1))
    return TargetLogits(texts, codes, torch.cat(logits))


def distil_drafter(
    model: Any,
    reader: PromptEncoder,
    data: TargetLogits,
    decay: CosineDecay,
    run: TrainingRun,
    batch: int = 32,
) -> None:
    """Train a drafter on the target's distributions, with most weight on the guided one."""

    def loss_of(item: TargetLogits) -> Tensor:
        conditional, unconditional = item.logits.float().unbind(1)
        predicted = [
            logits_of(model, prompts, item.codes)
            for prompts in guidance_branches(reader, item.texts)
        ]
        guided = mean_divergence(
            guide(conditional, unconditional, GUIDANCE), guide(predicted[0], predicted[1], GUIDANCE)
        )
        each = mean_divergence(conditional, predicted[0]) + mean_divergence(
            unconditional, predicted[1]
        )
        return guided + _BRANCHES * each

    matrices, others = generation_parameters(model)
    picks = shuffle_batches(len(data.texts), batch, np.random.default_rng((run.seed, 11)))
    fit(others, map(data.at, picks), loss_of, decay, "follow", run, matrices)


def head_examples(
    target: Any, processor: Any, texts: Sequence[str], codes: Tensor, batch: int, seed: int
) -> Iterator[TrainingExample]:
    """Training examples of a feature head: the same images, with guidance inputs."""
    drawing = image_family(target)
    assert drawing.unconditional is not None
    for picks in shuffle_batches(len(texts), batch, np.random.default_rng((seed, 13))):
        part = [texts[i] for i in picks]
        given = drawing.request(
            processor(text=part, generation_mode="image", padding=True, return_tensors="pt")
        )
        both = {SCALE: GUIDANCE, NEGATIVE: drawing.unconditional(given)}
        yield TrainingExample({**given, **both}, codes[torch.from_numpy(picks)])


def init_from_target(model: Any, target: Any) -> None:
    """Copy text embeddings, code embeddings and head of the target."""
    own, others = model.state_dict(), target.state_dict()
    shared = {n: w for n, w in others.items() if ".layers." not in n or "language_model" not in n}
    model.load_state_dict({**own, **{n: w for n, w in shared.items() if n in own}})


def mean_divergence(p: Tensor, q: Tensor) -> Tensor:  # logits (..., K) twice -> ()
    """Mean KL divergence KL(p || q)."""
    divergence = functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True
    )
    return divergence.sum(-1).mean()
