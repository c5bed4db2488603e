"""Predict actions: collect rounds under a deadline, decode tokens, and record statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import NAME, Episode
from mmspec.decode import decode
from mmspec.draft import Round
from mmspec.modalities.common.tokens import BoundTokens
from mmspec.modalities.vla.requests import ActionRequest
from mmspec.modalities.vla.robots import Robot
from mmspec.modalities.vla.step_stats import DRAFTED, HELD, TARGET, UNVERIFIED, ActionStep
from mmspec.modality import Call, Loop
from mmspec.targets.stop import Stop

NOISE_STRIDE = 1 << 20  # noise rows reserved for the requests of an episode
NUM_ROUNDS = 16  # of which the slowest estimates the next


@dataclass(frozen=True)
class ActionsOnly:
    """A logits processor that masks all ids except those of actions."""

    codes: ActionCodes

    def __call__(self, scores: Tensor, position: Tensor) -> Tensor:  # (B, M, V), (B, M)
        is_masked = _non_action_ids(self.codes, scores.shape[-1], scores.device)
        return scores.masked_fill(is_masked, -torch.inf)


@lru_cache(maxsize=64)
def _non_action_ids(codes: ActionCodes, size: int, device: torch.device) -> Tensor:  # (V,) bool
    """Mask of the ids that are no actions."""
    return ~codes.contains(torch.arange(size, device=device))


@dataclass(frozen=True)
class BoundPolicy:
    """A recipe bound to a policy with the action statistics of one data set."""

    bound: BoundTokens
    plain: BoundTokens  # decodes without speculation, for evaluation
    space: ActionSpace
    chunk: int  # actions per request

    @property
    def num_tokens(self) -> int:
        """Tokens per request."""
        return self.chunk * self.space.size

    def call(self, request: ActionRequest, robots: Sequence[Robot]) -> Call:
        """The call of a request; `partial()` of its rounds are the components so far."""
        made = self._call(self.bound, request, robots, [one.episode for one in robots])
        return replace(made, view=self.decode_partial)

    def predict_plain(self, request: ActionRequest, robots: Sequence[Robot]) -> list[list[int]]:
        """Tokens of plain decoding, with fresh episodes: the robots' histories do not change."""
        episodes = [Episode(self.space) for _ in robots]
        call = self._call(self.plain, request, robots, episodes)
        rows: list[list[int]] = [[] for _ in robots]
        for round_ in decode(call.parts, call.request):
            for row, new in zip(rows, round_.tokens, strict=True):
                row.extend(new)
        return rows

    def _call(
        self,
        bound: BoundTokens,
        request: ActionRequest,
        robots: Sequence[Robot],
        episodes: Sequence[Episode],
    ) -> Call:
        """The noise depends on seed, robot and number of its requests, not on the batch."""
        numbers = zip(request.robots, robots, strict=True)
        rows = [number * NOISE_STRIDE + robot.num_requests for number, robot in numbers]
        settings = (request.sampling, Stop(self.num_tokens), request.seed, rows)
        return bound.call(request.inputs, *settings, shared={NAME: episodes})

    def decode_partial(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The components so far of each robot, in its units."""
        actions = [self.to_units(self.decode_tokens(row, None)) for row in rows]
        return [one.reshape(-1)[: len(row)] for one, row in zip(actions, rows, strict=True)]

    def decode_tokens(self, row: Sequence[int], held: Tensor | None) -> Tensor:
        """Normalised values (chunk, D); missing components are those of `held` (D,), default 0."""
        rest = torch.zeros(self.space.size, dtype=torch.float64) if held is None else held
        values = rest.repeat(self.chunk)
        values[: len(row)] = self.space.codes.decode(torch.tensor(row, dtype=torch.int64))
        return values.view(self.chunk, self.space.size)

    def to_units(self, values: Tensor) -> np.ndarray:  # (..., D) normalised -> the robot's units
        found: np.ndarray = self.space.unnormalise(values).numpy()
        return found


def fresh_episodes(space: ActionSpace, batch: int) -> Mapping[str, Any]:
    """Empty episodes, for `generate`, which has no robots."""
    return {NAME: [Episode(space) for _ in range(batch)]}


@dataclass
class RowTokens:
    """Tokens and statistics of the rounds of one request, for one robot."""

    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of each token: see `ActionStep.sources`
    rounds: int = 0
    target_calls: int = 0  # prefill aside
    accepted: list[int] = field(default_factory=list)  # of each round with a draft
    first_error: int | None = None
    unverified: int = 0

    def add(self, round_: Round, row: int) -> None:
        new = round_.tokens[row]
        if not new:
            return
        self.rounds += 1
        self.target_calls += round_.calls
        own = len(new) - len(round_.path[row])  # predicted by the target
        self.sources += [UNVERIFIED if round_.is_unverified else DRAFTED] * len(round_.path[row])
        self.sources += [TARGET] * own
        if round_.is_unverified:
            self.unverified += len(new)
        elif round_.drafted[row]:
            accepted = round_.accepted[row]
            self.accepted.append(accepted)
            is_refused = round_.takes_next[row] and accepted < min(
                round_.depth, round_.drafted[row]
            )
            if is_refused and self.first_error is None:
                self.first_error = len(self.tokens) + accepted
        self.tokens.extend(new)


class RoundTimes:
    """Durations of recent rounds in seconds, over all requests of a policy."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=NUM_ROUNDS)

    def record(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def slowest(self) -> float:
        return max(self._recent, default=0.0)


@dataclass(frozen=True)
class Deadline:
    """The time limit of an action, from `start` of `perf_counter`; None = no limit."""

    start: float
    limit_ms: float | None
    round_times: RoundTimes

    @property
    def elapsed_ms(self) -> float:
        return 1e3 * (perf_counter() - self.start)

    @property
    def is_missed(self) -> bool:
        return self.limit_ms is not None and self.elapsed_ms > self.limit_ms

    @property
    def is_near(self) -> bool:
        """Whether one more round, as slow as the slowest recent one, would exceed the limit."""
        if self.limit_ms is None:
            return False
        return self.elapsed_ms + 1e3 * self.round_times.slowest > self.limit_ms


def collect_rounds(
    rounds: Iterable[Round], batch: int, deadline: Deadline, can_hold: bool
) -> list[RowTokens]:
    """Collect the rounds of a request until they end or the deadline is near.

    Rounds are not interrupted; without an action to hold (`can_hold`) all of them are executed.
    """
    rows, last = [RowTokens() for _ in range(batch)], 0.0
    for round_ in rounds:
        for row, tokens in enumerate(rows):
            tokens.add(round_, row)
        now = perf_counter()
        if round_.calls and round_.index:
            deadline.round_times.record(now - last)
        last = now
        if can_hold and not all(round_.finished) and deadline.is_near:
            break
    return rows


def predict_actions(
    policy: BoundPolicy,
    request: ActionRequest,
    robots: Sequence[Robot],
    loop: Loop,
    deadline: Deadline,
) -> list[tuple[np.ndarray, ActionStep]]:
    """The actions (chunk, D) of each robot in its units, and statistics of the step.

    When the deadline is near, missing components are those of the previous action; without a
    previous action all rounds are executed.
    """
    for robot in robots:
        robot.commit_predictions()
    can_hold = all(robot.episode.actions for robot in robots)
    rows = collect_rounds(loop(policy.call(request, robots)), len(robots), deadline, can_hold)
    values = [
        policy.decode_tokens(row.tokens, next(reversed(robot.episode.actions), None))
        for row, robot in zip(rows, robots, strict=True)
    ]
    actions = [policy.to_units(one) for one in values]
    latency_ms, is_late = deadline.elapsed_ms, deadline.is_missed
    plain = policy.predict_plain(request, robots) if request.is_evaluated else [None] * len(rows)
    found = []
    for robot, row, own, action, greedy in zip(robots, rows, values, actions, plain, strict=True):
        step = _step(policy, robot.num_requests, row, latency_ms, is_late)
        if greedy is not None:
            step = _add_errors(policy, step, action, greedy)
        robot.predicted = list(own)
        robot.num_requests += 1
        robot.steps.append(step)
        found.append((action, step))
    return found


def _step(
    policy: BoundPolicy, index: int, taken: RowTokens, latency_ms: float, is_late: bool
) -> ActionStep:
    return ActionStep(
        index=index,
        tokens=tuple(taken.tokens),
        sources=(*taken.sources, *[HELD] * (policy.num_tokens - len(taken.tokens))),
        rounds=taken.rounds,
        target_calls=taken.target_calls,
        accepted=tuple(taken.accepted),
        first_error=taken.first_error,
        unverified=taken.unverified,
        held=policy.num_tokens - len(taken.tokens),
        latency_ms=latency_ms,
        is_late=is_late,
    )


def _add_errors(
    policy: BoundPolicy, step: ActionStep, action: np.ndarray, greedy: list[int]
) -> ActionStep:
    """Add the distances to the target's own greedy action for the same image."""
    codes, size = policy.space.codes, policy.space.size
    expected = policy.decode_tokens(greedy, None)
    off = np.abs(action - policy.to_units(expected)).reshape(-1, size)
    encoded = codes.encode(policy.space.normalise(torch.from_numpy(action)))
    bins = (encoded - codes.encode(expected)).abs().reshape(-1, size)
    return replace(
        step,
        token_distance=tuple(bins.max(0).values.tolist()),
        action_error=tuple(off.max(0).tolist()),
    )
