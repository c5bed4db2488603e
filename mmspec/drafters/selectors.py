"""Online choice among arms, such as drafters: bandits, and Hedge where all losses are known.

Rewards lie in [0, 1]. A selector is a value; its state is a list of numbers per arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar, Protocol

from mmspec.errors import check_number


@dataclass
class ArmCounts:
    """What is known of every arm."""

    pulls: list[int]
    sums: list[float]  # of rewards, or of estimated losses
    random: Random = field(default_factory=lambda: Random(0))
    probability: list[float] = field(default_factory=list)  # of the last choice

    @classmethod
    def begin(cls, arms: int) -> ArmCounts:
        return cls([0] * arms, [0.0] * arms)

    @property
    def total(self) -> int:
        return sum(self.pulls)


class Selector(Protocol):
    """Chooses an arm, and learns from the reward of that arm or, with `sees_all`, of all arms."""

    @property
    def sees_all(self) -> bool: ...
    def choose(self, counts: ArmCounts) -> int: ...
    def observe(self, counts: ArmCounts, arm: int, rewards: Sequence[float]) -> None: ...


@dataclass(frozen=True)
class UpperConfidence:
    """The arm with the largest mean + sqrt(c log t / n) (BanditSpec, Hou et al. 2025; MetaSD).

    n counts the pulls of that arm. The released code divides by the pulls of all arms, which makes
    the bonus equal for all and the choice greedy.
    """

    c: float = 0.5
    sees_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("c", self.c, 0, example=0.5)

    def choose(self, counts: ArmCounts) -> int:
        if 0 in counts.pulls:
            return counts.pulls.index(0)
        log = math.log(counts.total)
        bounds = [
            total / pulls + math.sqrt(self.c * log / pulls)
            for total, pulls in zip(counts.sums, counts.pulls, strict=True)
        ]
        return bounds.index(max(bounds))

    def observe(self, counts: ArmCounts, arm: int, rewards: Sequence[float]) -> None:
        counts.pulls[arm] += 1
        counts.sums[arm] += rewards[arm]


@dataclass(frozen=True)
class Exp3:
    """Weights from importance-weighted losses, for rewards that change (EXP3; BanditSpec)."""

    rate: float = 0.1
    sees_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("rate", self.rate, 0, 1, example=0.1)

    def choose(self, counts: ArmCounts) -> int:
        weights = _softmax([-self.rate * loss for loss in counts.sums])
        explored = [(1 - self.rate) * one + self.rate / len(weights) for one in weights]
        counts.probability = explored
        return counts.random.choices(range(len(weights)), explored)[0]

    def observe(self, counts: ArmCounts, arm: int, rewards: Sequence[float]) -> None:
        counts.pulls[arm] += 1
        counts.sums[arm] += (1 - rewards[arm]) / counts.probability[arm]


@dataclass(frozen=True)
class Hedge:
    """Exponential weights on the losses of all arms (Not-a-Bandit, 2025).

    w_i is multiplied by exp(-eta loss_i) after every round. `share` of the weight is spread over
    all arms, so that a change of domain is followed (fixed share; reconstructed, 0 is plain Hedge).
    The arm of the largest weight drafts.
    """

    eta: float = 0.5
    share: float = 0.01
    sees_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("eta", self.eta, 0, example=0.5)
        check_number("share", self.share, 0, 1, example=0.01)

    def choose(self, counts: ArmCounts) -> int:
        return counts.sums.index(max(counts.sums))

    def observe(self, counts: ArmCounts, arm: int, rewards: Sequence[float]) -> None:
        """`sums` are the logarithms of the weights."""
        counts.pulls[arm] += 1
        pairs = zip(counts.sums, rewards, strict=True)
        weights = _softmax([log - self.eta * (1 - reward) for log, reward in pairs])
        mixed = [(1 - self.share) * one + self.share / len(weights) for one in weights]
        counts.sums = [math.log(max(one, 1e-300)) for one in mixed]


SELECTORS: Mapping[str, Callable[[], Selector]] = {
    "hedge": Hedge,
    "ucb": UpperConfidence,
    "exp3": Exp3,
}


def _softmax(logs: Sequence[float]) -> list[float]:
    largest = max(logs)
    weights = [math.exp(one - largest) for one in logs]
    total = sum(weights)
    return [one / total for one in weights]
