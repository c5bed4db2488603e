"""Teach a drafter the target's distributions of the codes of pictures that the target drew itself."""

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
from mmspec.training.fitting import Course, Fall, chunks, fit, shuffled
from mmspec.training.heads import Lesson
from mmspec.zoo.prompts import loose_prompt, training_scenes
from tools.zoo.image.evaluate import branches, drawn_codes
from tools.zoo.image.models import GUIDANCE
from tools.zoo.image.training import PromptEncoder, drawing_weights, logits_of

_BRANCHES = 0.2  # weight of the distributions of the two branches beside the guided one


@dataclass(frozen=True)
class Watched:
    """Prompts, codes (n, 81) drawn by them and the target's logits (n, 2, 81, K) of them.

    The first logits are those with the prompt, the second those without.
    """

    texts: list[str]
    codes: Tensor
    logits: Tensor

    def at(self, picks: np.ndarray) -> Watched:
        """Some of them."""
        rows = torch.from_numpy(picks)
        return Watched([self.texts[i] for i in picks], self.codes[rows], self.logits[rows])


def drawn_by(
    target: Any, processor: Any, n: int, course: Course, batch: int = 64
) -> tuple[list[str], Tensor]:
    """Prompts for `n` training scenes, and codes (n, 81) that the target draws by them.

    At temperature 1 and the default guidance.
    """
    seed = course.seed
    generator = np.random.default_rng((seed, 10))
    texts = [loose_prompt(scene, generator) for scene in islice(training_scenes(seed), n)]
    turns = enumerate(chunks(texts, batch, "watch", course.progress))
    codes = [drawn_codes(target, processor, part, seed + turn * batch) for turn, part in turns]
    return texts, torch.cat(codes)


@torch.no_grad()
def watched(
    target: Any, processor: Any, texts: list[str], codes: Tensor, batch: int = 64
) -> Watched:
    """The target's distributions of the codes (n, 81) of pictures, with the prompts and without."""
    reader = PromptEncoder(processor.tokenizer)
    logits = []
    for part, drawn in zip(chunks(texts, batch), codes.split(batch), strict=True):
        both = [logits_of(target, told, drawn).half() for told in branches(reader, part)]
        logits.append(torch.stack(both, 1))
    return Watched(texts, codes, torch.cat(logits))


def follow(
    model: Any,
    reader: PromptEncoder,
    seen: Watched,
    fall: Fall,
    course: Course,
    batch: int = 32,
) -> None:
    """Train a drafter to have the target's distributions, above all the guided one."""

    def loss_of(item: Watched) -> Tensor:
        told, silent = item.logits.float().unbind(1)
        own = [logits_of(model, prompts, item.codes) for prompts in branches(reader, item.texts)]
        guided = apart(guide(told, silent, GUIDANCE), guide(own[0], own[1], GUIDANCE))
        each = apart(told, own[0]) + apart(silent, own[1])
        return guided + _BRANCHES * each

    matrices, others = drawing_weights(model)
    picks = shuffled(len(seen.texts), batch, np.random.default_rng((course.seed, 11)))
    fit(others, map(seen.at, picks), loss_of, fall, "follow", course, matrices)


def head_lessons(
    target: Any, processor: Any, texts: Sequence[str], codes: Tensor, batch: int, seed: int
) -> Iterator[Lesson]:
    """What a feature head learns from: the same pictures, with prompts and without."""
    drawing = image_family(target)
    assert drawing.unconditional is not None
    for picks in shuffled(len(texts), batch, np.random.default_rng((seed, 13))):
        told = [texts[i] for i in picks]
        given = drawing.request(
            processor(text=told, generation_mode="image", padding=True, return_tensors="pt")
        )
        both = {SCALE: GUIDANCE, NEGATIVE: drawing.unconditional(given)}
        yield Lesson({**given, **both}, codes[torch.from_numpy(picks)])


def begin_like(model: Any, target: Any) -> None:
    """Begin with the words, the codes and the head of the target."""
    own, others = model.state_dict(), target.state_dict()
    shared = {n: w for n, w in others.items() if ".layers." not in n or "language_model" not in n}
    model.load_state_dict({**own, **{n: w for n, w in shared.items() if n in own}})


def apart(p: Tensor, q: Tensor) -> Tensor:  # logits (..., K) twice -> ()
    """Mean divergence of distributions q from distributions p."""
    divergence = functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True
    )
    return divergence.sum(-1).mean()
