"""Learned draft lengths: a small network predicts whether the next drafted token is accepted.

It reads the draft distribution and the place in the draft, before the token is drawn, so the output
stays exact. `mmspec train stop` trains it (`mmspec.training.stops`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.drafters.acceptance import AcceptanceHead
from mmspec.drafters.lengths.length import Length
from mmspec.errors import check_number
from mmspec.targets.tokens.context import Context

FEATURES = 4  # of `stop_features`


def stop_features(distribution: Categorical, step: int) -> Tensor:  # (B, 1) or (B,) -> (B, 4)
    """Entropy (nats), the two largest probabilities, and log(1 + step) of a draft distribution."""
    scores = distribution.scores.float().reshape(-1, distribution.size)
    log_probs = scores.log_softmax(-1)
    entropy = -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)
    best = log_probs.topk(2, -1).values.exp()
    place = torch.full_like(entropy, float(step)).log1p()
    return torch.stack((entropy, *best.unbind(-1), place), -1)


class StopHead(AcceptanceHead):
    """Predicts the acceptance of a drafted token from `stop_features`: logits (...)."""

    features = FEATURES
    noun = "stop head"
    command = "mmspec train stop"


@dataclass
class Progress:
    """The current draft: tokens so far, and log P(all of them are accepted) per row."""

    step: int = 0
    kept: Any = 0.0  # 0, or (B,)


@dataclass(frozen=True)
class LearnedStop(Length):
    """Stops where a `StopHead` predicts a rejection; subclasses define the criterion.

    `head` may be a file. Raises ValueError for anything else.
    """

    head: StopHead | str | Path
    threshold: float = 0.5
    max_length: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, 0, 1, example=0.5)
        object.__setattr__(self, "head", StopHead.read(self.head))

    def begin(self) -> Progress:
        return Progress()

    def budget(self, state: Progress, context: Context) -> int:
        state.step, state.kept = 0, 0.0
        return super().budget(state, context)

    @torch.no_grad()
    def draft_mask(self, state: Progress, distribution: Categorical) -> Tensor:  # (B,) bool
        assert isinstance(self.head, StopHead)
        features = stop_features(distribution, state.step)
        self.head.to(features.device)
        log_chance = nn.functional.logsigmoid(self.head(features))
        state.step, state.kept = state.step + 1, state.kept + log_chance
        return self.goes_on(log_chance, state.kept)

    @abstractmethod
    def goes_on(self, log_chance: Tensor, kept: Tensor) -> Tensor:
        """(B,) from log P(the next token is accepted) and log P(all of the draft are)."""


@dataclass(frozen=True)
class Disco(LearnedStop):
    """Draft while P(the next token is accepted) is at least `threshold` (DISCO, Mamou et al. 2024).

    Reconstructed: the network and its features.
    """

    def goes_on(self, log_chance: Tensor, kept: Tensor) -> Tensor:
        return log_chance.exp() >= self.threshold


@dataclass(frozen=True)
class SpecDecPP(LearnedStop):
    """Draft while P(any token of the draft is refused) is at most `threshold` (SpecDec++, 2024).

    Huang et al. 2024 (arXiv 2405.19715), equation 5; 0.3 and 20 tokens are theirs for Alpaca. The
    head reads the draft distribution in place of the draft model's last state.
    """

    threshold: float = 0.3
    max_length: int = 20

    def goes_on(self, log_chance: Tensor, kept: Tensor) -> Tensor:
        return 1 - kept.exp() <= self.threshold
