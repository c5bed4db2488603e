"""Draft lengths: policies that decide how many tokens to draft, before each draw.

Whether a position is drafted may depend on anything known before its token is drawn. Dropping a
drawn token because of its own probability would bias the output, so no policy reads tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Round
from mmspec.errors import check_number
from mmspec.targets.tokens.context import Context


class Length:
    """Decides how many tokens to draft, at most `max_length`.

    By default a policy has no state and drafts `max_length` tokens.
    """

    max_length: int
    min_length: ClassVar[int] = 1  # the smallest valid `max_length`

    def __post_init__(self) -> None:
        if self.max_length < self.min_length:
            raise ValueError(
                f"max_length={self.max_length} is not a draft length; give {self.min_length} or "
                "more"
            )

    def begin(self) -> Any:
        return None

    def budget(self, state: Any, context: Context) -> int:
        """Tokens to draft in this round; 0 = a plain step."""
        return min(self.max_length, max_useful_length(context))

    def draft_mask(self, state: Any, distribution: Categorical) -> Tensor | None:
        """(B,) bool, whether to draw from `distribution`; None = all rows."""
        return None

    def observe(self, state: Any, round_: Round) -> Any:
        return state


def max_useful_length(context: Context) -> int:
    """The longest draft that can still be accepted: every round adds one token of the target."""
    left = [context.num_left(row) for row, finished in enumerate(context.finished) if not finished]
    return max(max(left, default=0) - 1, 0)


def useful_lengths(context: Context, budget: int) -> Tensor | None:  # (B,)
    """The longest draft of each row that can still be accepted, in a batch of several requests.

    None where no row needs less than `budget`. A row then drafts as much as alone, so that rules
    that use fresh noise give it the same tokens.
    """
    if context.request.row_limits is None:
        return None
    left = [max(context.num_left(row) - 1, 0) for row in range(context.batch)]
    return None if min(left) >= budget else torch.tensor(left, device=context.device)


@dataclass(frozen=True)
class Fixed(Length):
    """Always `max_length` tokens; 0 is plain decoding."""

    max_length: int
    min_length: ClassVar[int] = 0


@dataclass(frozen=True)
class Heuristic(Length):
    """Two more after a fully accepted draft, else one less (transformers' "heuristic" schedule).

    In a batch one fully accepted row is enough to increase, as in BASS.
    """

    start: int = 5
    max_length: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.start <= self.max_length:
            raise ValueError(f"start={self.start} must lie within 1..max_length={self.max_length}")

    def begin(self) -> int:
        return self.start

    def budget(self, state: int, context: Context) -> int:
        return min(state, max_useful_length(context))

    def observe(self, state: int, round_: Round) -> int:
        counts = acceptance_counts(round_)
        if not counts:
            return state
        whole = any(accepted == num_tested for accepted, num_tested in counts)
        return min(state + 2, self.max_length) if whole else max(state - 1, 1)


@dataclass(frozen=True)
class AcceptanceBand(Length):
    """One more while the smoothed acceptance rate is above `high`, one less while below `low`.

    The block size of UGSD (Xue et al. 2026), whose constants are not public. A block may fill all
    remaining positions: where a gate accepts it, no token of the target follows.
    """

    start: int = 4
    max_length: int = 16
    low: float = 0.5
    high: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.start <= self.max_length or not 0 <= self.low <= self.high <= 1:
            raise ValueError(
                f"start={self.start}, max_length={self.max_length}, low={self.low}, "
                f"high={self.high}; start lies within 1..max_length, and 0 <= low <= high <= 1"
            )

    def begin(self) -> tuple[int, float]:
        return self.start, (self.low + self.high) / 2

    def budget(self, state: tuple[int, float], context: Context) -> int:
        return min(state[0], max_useful_length(context) + 1)

    def observe(self, state: tuple[int, float], round_: Round) -> tuple[int, float]:
        (size, rate), counts = state, acceptance_counts(round_)
        if not counts:
            return state
        now = sum(accepted for accepted, _ in counts) / sum(num_tested for _, num_tested in counts)
        rate = (rate + now) / 2
        size += (rate > self.high) - (rate < self.low)
        return min(max(size, 1), self.max_length), rate


@dataclass(frozen=True)
class Entropy(Length):
    """Draft while sqrt(c H(q)) <= h (SVIP, Zhang et al. 2024): stop where the drafter is uncertain.

    H in nats; the square root bounds the rejection probability from above up to the factor c.
    """

    h: float = 0.3
    c: float = 0.15
    max_length: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, usual in (("h", 0.3), ("c", 0.15)):
            check_number(name, getattr(self, name), 0, example=usual)

    def draft_mask(self, state: None, distribution: Categorical) -> Tensor:  # (B,) bool
        return _entropy_is_low(distribution, self.h, self.c)


@dataclass
class _EntropyLevel:
    """The state of `AdaptiveEntropy` during a request."""

    h: float
    rate: float


@dataclass(frozen=True)
class AdaptiveEntropy(Length):
    """`Entropy` with an h adapted until a share `target` of the draft is accepted (AdaEDL, 2024).

    AdaEDL writes 1 - sqrt(c H(q)) >= lambda, which is h = 1 - lambda; lambda moves as in Draft &
    Verify: by a smoothed step of `step` against the error of a smoothed acceptance rate.
    """

    target: float = 0.9
    h: float = 0.3
    c: float = 0.2
    step: float = 0.01
    max_length: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.target < 1:
            raise ValueError(
                f"target={self.target} is not an acceptance rate; give one within (0, 1)"
            )
        for name, usual in (("h", 0.3), ("c", 0.2), ("step", 0.01)):
            check_number(name, getattr(self, name), 0, example=usual)

    def begin(self) -> _EntropyLevel:
        return _EntropyLevel(self.h, self.target)

    def draft_mask(self, state: _EntropyLevel, distribution: Categorical) -> Tensor:  # (B,) bool
        return _entropy_is_low(distribution, state.h, self.c)

    def observe(self, state: _EntropyLevel, round_: Round) -> _EntropyLevel:
        counts = acceptance_counts(round_)
        if counts:
            now = sum(accepted for accepted, _ in counts) / sum(
                num_tested for _, num_tested in counts
            )
            rate = 0.5 * state.rate + 0.5 * now
            target_level = state.h + self.step if rate > self.target else state.h - self.step
        else:  # nothing was drafted: raise h, or a strict level would never be tested
            rate, target_level = state.rate, state.h + self.step
        return _EntropyLevel(min(max(0.9 * state.h + 0.1 * target_level, 0.0), 1.0), rate)


@dataclass(frozen=True)
class Confidence(Length):
    """Draft while the drafter's best token has at least probability `threshold`."""

    threshold: float = 0.4
    max_length: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("threshold", self.threshold, 0, 1, example=0.4)

    def draft_mask(self, state: None, distribution: Categorical) -> Tensor:  # (B,) bool
        return _rows(_softmax(distribution).amax(-1) >= self.threshold)


def acceptance_counts(round_: Round) -> list[tuple[int, int]]:
    """Accepted and proposed depth of each row that drafted; rows cut by a stop are left out."""
    rows = zip(round_.accepted, round_.drafted, round_.finished, strict=True)
    return [
        (accepted, min(drafted, round_.depth))
        for accepted, drafted, finished in rows
        if drafted and not finished
    ]


def _softmax(distribution: Categorical) -> Tensor:  # (..., V)
    """Probabilities from the scores: a point mass would make a greedy drafter always certain."""
    return distribution.scores.float().softmax(-1)


def _entropy_is_low(distribution: Categorical, h: float, c: float) -> Tensor:  # (B,) bool
    entropy = Categorical(distribution.scores.float()).entropy()
    return _rows(torch.sqrt(c * entropy.clamp_min(0)) <= h)


def _rows(answer: Tensor) -> Tensor:  # (B,) or (B, 1) -> (B,)
    return answer.reshape(answer.shape[0])
