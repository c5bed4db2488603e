"""Train a stop head: run a recipe with a draft model, and note which drafted tokens are accepted.

recipe = mmspec.recipes.get("speculative-sampling")
bind = lambda shape: mmspec.accelerate(model, replace(recipe, execution=shape), drafter=drafter)
train_stop(bind, requests).head.save("stop.safetensors")
mmspec.accelerate(model, drafter=drafter, length=SpecDecPP("stop.safetensors"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Kind
from mmspec.drafters.draft_model import DraftModel, DraftUpdate, GrownDraft
from mmspec.drafters.lengths.learned import StopHead, stop_features
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain, Shape
from mmspec.errors import check_number
from mmspec.recipe import LINEAR
from mmspec.targets.tokens.context import Context
from mmspec.training.acceptance_heads import fit_head, record_drafts

REFUSED_WEIGHT = 6.0  # of refused tokens in the loss (SpecDec++, section 4)


@dataclass(frozen=True)
class RecordedChain(Shape):
    """A chain that notes the features of each drafted token and min(1, p / q) of it."""

    length: int
    features: list[Tensor] = field(default_factory=list, compare=False)  # (n, 4) each
    labels: list[Tensor] = field(default_factory=list, compare=False)  # (n,) each

    kinds = (Kind.IID, Kind.WOR)
    walk = LINEAR

    @property
    def description(self) -> str:
        return f"chain of {self.length}"

    @property
    def max_depth(self) -> int:
        return self.length

    def grow(
        self, model: DraftModel, context: Context, state: Any, shape_state: Any, kind: Kind
    ) -> GrownDraft:
        return Chain(Fixed(self.length)).grow(model, context, state, shape_state, kind)

    def observe(self, shape_state: Any, update: DraftUpdate) -> Any:
        p = as_categorical(update.scores.distribution).evaluate()
        for step in range(update.draft.nodes):
            q = update.distributions[step]
            x, rows = update.draft.tokens[:, step], torch.arange(update.draft.batch)
            place = x[:, None]
            label = (p[:, step : step + 1].prob(place) / q.prob(place).clamp_min(1e-9))[:, 0]
            live = torch.tensor(update.round.accepted) >= step  # its prefix was accepted
            live &= ~torch.tensor(update.round.finished)
            chosen = rows[live]
            self.features.append(stop_features(q, step)[chosen].cpu())
            self.labels.append(label[chosen].clamp_max(1).float().cpu())
        return shape_state


@dataclass(frozen=True)
class TrainedStop:
    """A stop head, and what it was trained on."""

    head: StopHead
    num_tokens: int
    acceptance: float  # mean label
    loss: float  # at the end, per token


def train_stop(
    bind: Callable[[Shape], Any],
    requests: Sequence[Mapping[str, Any]],
    length: int = 8,
    steps: int = 500,
    rate: float = 1e-2,
    seed: int = 0,
) -> TrainedStop:
    """Train a head on drafts of `length` tokens.

    `bind` accelerates a model with a draft model and a shape, `requests` are arguments of its
    `generate`, settings included. Labels are min(1, p(x) / q(x)), of tokens whose prefix was
    accepted. Raises ValueError where nothing was drafted.
    """
    check_number("length", length, 1, whole=True, example=8)
    check_number("steps", steps, 1, whole=True, example=500)
    shape = RecordedChain(length)
    return fit_stop(*record_drafts(bind, shape, requests), steps, rate, seed)


def fit_stop(
    features: Tensor, labels: Tensor, steps: int, rate: float = 1e-2, seed: int = 0
) -> TrainedStop:  # (n, 4), (n,)
    """Fit a head by binary cross entropy with soft labels, in which refusals weigh six times."""
    head, loss = fit_head(StopHead, features, labels, steps, rate, seed, 1 / REFUSED_WEIGHT)
    return TrainedStop(head, len(labels), float(labels.mean()), loss)
