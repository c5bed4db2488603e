"""How long a draft may be: asked before each draw, never after it.

Whether a position is drafted may depend on anything known before its token is drawn. Dropping a
drawn token because of its own probability would bias the output, so no policy here sees tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Round
from mmspec.targets.tokens.context import Context


class Length:
    """Decides how far to draft; `most` is the longest draft it may ask for.

    What a policy leaves as it is here has no memory and drafts as far as that.
    """

    most: int
    least: ClassVar[int] = 1  # the smallest `most` that makes sense

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise ValueError(f"most={self.most} is no draft length; give {self.least} or more")

    def begin(self) -> Any:
        return None

    def budget(self, state: Any, context: Context) -> int:
        """Tokens this round, 0 = a plain step."""
        return min(self.most, useful(context))

    def more(self, state: Any, distribution: Categorical) -> Tensor | None:
        """(B,) bool, whether to draw from `distribution`; None = all rows."""
        return None

    def observe(self, state: Any, kept: Round) -> Any:
        return state


def useful(context: Context) -> int:
    """The longest draft that can still be kept: every round adds a token of the target's own."""
    left = [
        context.request.room - context.generated(row)
        for row, finished in enumerate(context.finished)
        if not finished
    ]
    return max(max(left, default=0) - 1, 0)


@dataclass(frozen=True)
class Fixed(Length):
    """Always `most` tokens; 0 is plain decoding."""

    most: int
    least: ClassVar[int] = 0


@dataclass(frozen=True)
class Heuristic(Length):
    """Two more after a draft kept whole, else one less (transformers' "heuristic" schedule).

    In a batch one whole row is enough to go up, as in BASS.
    """

    start: int = 5
    most: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.start <= self.most:
            raise ValueError(f"start={self.start} lies outside 1..most={self.most}")

    def begin(self) -> int:
        return self.start

    def budget(self, state: int, context: Context) -> int:
        return min(state, useful(context))

    def observe(self, state: int, kept: Round) -> int:
        seen = tries(kept)
        if not seen:
            return state
        whole = any(accepted == tried for accepted, tried in seen)
        return min(state + 2, self.most) if whole else max(state - 1, 1)


@dataclass(frozen=True)
class AcceptanceBand(Length):
    """One more while a smoothed share of accepted tokens is above `high`, one less below `low`.

    UGSD's block (Xue et al. 2026), whose constants are not public. A block may fill all the room
    there is: where a gate keeps it, no token of the target's own follows.
    """

    start: int = 4
    most: int = 16
    low: float = 0.5
    high: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.start <= self.most or not 0 <= self.low <= self.high <= 1:
            raise ValueError(
                f"start={self.start}, most={self.most}, low={self.low}, high={self.high}; start "
                "lies within 1..most, and 0 <= low <= high <= 1"
            )

    def begin(self) -> tuple[int, float]:
        return self.start, (self.low + self.high) / 2

    def budget(self, state: tuple[int, float], context: Context) -> int:
        return min(state[0], useful(context) + 1)

    def observe(self, state: tuple[int, float], kept: Round) -> tuple[int, float]:
        (size, rate), seen = state, tries(kept)
        if not seen:
            return state
        now = sum(accepted for accepted, _ in seen) / sum(tried for _, tried in seen)
        rate = (rate + now) / 2
        size += (rate > self.high) - (rate < self.low)
        return min(max(size, 1), self.most), rate


@dataclass(frozen=True)
class Entropy(Length):
    """Draft on while sqrt(c H(q)) <= h (SVIP, Zhang et al. 2024): stop where the drafter is unsure.

    H in nats; the square root bounds the rejection probability from above up to the factor c.
    """

    h: float = 0.3
    c: float = 0.15
    most: int = 10

    def more(self, state: None, distribution: Categorical) -> Tensor:  # (B,) bool
        return _sure(distribution, self.h, self.c)


@dataclass
class _EntropyLevel:
    """What `AdaptiveEntropy` learns during a request."""

    h: float
    rate: float


@dataclass(frozen=True)
class AdaptiveEntropy(Length):
    """`Entropy` whose h is moved until a share `target` of the draft is accepted (AdaEDL, 2024).

    AdaEDL writes 1 - sqrt(c H(q)) >= lambda, which is h = 1 - lambda; lambda moves as in Draft &
    Verify: a smoothed step of `step` against the error of a smoothed acceptance rate.
    """

    target: float = 0.9
    h: float = 0.3
    c: float = 0.2
    step: float = 0.01
    most: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target < 1:
            raise ValueError(
                f"target={self.target} is not an acceptance rate; give one within (0, 1)"
            )

    def begin(self) -> _EntropyLevel:
        return _EntropyLevel(self.h, self.target)

    def more(self, state: _EntropyLevel, distribution: Categorical) -> Tensor:  # (B,) bool
        return _sure(distribution, state.h, self.c)

    def observe(self, state: _EntropyLevel, kept: Round) -> _EntropyLevel:
        seen = tries(kept)
        if seen:
            now = sum(accepted for accepted, _ in seen) / sum(tried for _, tried in seen)
            rate = 0.5 * state.rate + 0.5 * now
            wanted = state.h + self.step if rate > self.target else state.h - self.step
        else:  # nothing was drafted: without this a strict level would never be tested again
            rate, wanted = state.rate, state.h + self.step
        return _EntropyLevel(min(max(0.9 * state.h + 0.1 * wanted, 0.0), 1.0), rate)


@dataclass(frozen=True)
class Confidence(Length):
    """Draft on while the drafter's best token has at least probability `threshold`."""

    threshold: float = 0.4
    most: int = 10

    def more(self, state: None, distribution: Categorical) -> Tensor:  # (B,) bool
        return _rows(_soft(distribution).amax(-1) >= self.threshold)


def tries(kept: Round) -> list[tuple[int, int]]:
    """Accepted and proposed depth of each row that drafted; rows cut by a stop say nothing."""
    rows = zip(kept.accepted, kept.drafted, kept.finished, strict=True)
    return [
        (accepted, min(drafted, kept.depth))
        for accepted, drafted, finished in rows
        if drafted and not finished
    ]


def _soft(distribution: Categorical) -> Tensor:  # (..., V)
    """Probabilities by the scores: a point mass would make a greedy drafter always sure."""
    return distribution.scores.float().softmax(-1)


def _sure(distribution: Categorical, h: float, c: float) -> Tensor:  # (B,) bool
    entropy = Categorical(distribution.scores.float()).entropy()
    return _rows(torch.sqrt(c * entropy.clamp_min(0)) <= h)


def _rows(answer: Tensor) -> Tensor:  # (B,) or (B, 1) -> (B,)
    return answer.reshape(answer.shape[0])
