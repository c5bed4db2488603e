"""One question answered: rounds become tokens, those an action, and what it took is noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import NAME, Episode
from mmspec.decode import decode
from mmspec.modalities.common.tokens import BoundTokens
from mmspec.modalities.vla.acting import Deadline, Taken, act
from mmspec.modalities.vla.asked import ActionQuestion
from mmspec.modalities.vla.robots import Robot
from mmspec.modalities.vla.step_stats import HELD, ActionStep
from mmspec.modality import Call, Loop
from mmspec.targets.stop import Stop

APART = 1 << 20  # questions of an episode whose noise is kept apart


@dataclass(frozen=True)
class ActionsOnly:
    """Lets a model say nothing but actions: what else it would say no robot could do."""

    codes: ActionCodes

    def __call__(self, scores: Tensor, position: Tensor) -> Tensor:  # (B, M, V), (B, M)
        return scores.masked_fill(_others(self.codes, scores.shape[-1], scores.device), -torch.inf)


@lru_cache(maxsize=64)
def _others(codes: ActionCodes, size: int, device: torch.device) -> Tensor:  # (V,) bool
    """Which ids are no actions."""
    return ~codes.contains(torch.arange(size, device=device))


@dataclass(frozen=True)
class BoundPolicy:
    """A recipe bound to a policy with the action statistics of one data set."""

    bound: BoundTokens
    plain: BoundTokens  # what decodes without speculation, for evaluation
    space: ActionSpace
    chunk: int  # actions of one answer

    @property
    def places(self) -> int:
        """Tokens of an answer."""
        return self.chunk * self.space.size

    def call(self, question: ActionQuestion, robots: Sequence[Robot]) -> Call:
        """A question in terms of the loop; `partial()` of its rounds are the components so far."""
        made = self._call(self.bound, question, robots, [one.episode for one in robots])
        return replace(made, view=self.partial)

    def greedy(self, question: ActionQuestion, robots: Sequence[Robot]) -> list[list[int]]:
        """What plain decoding answers; by nobody's history, so none is touched."""
        episodes = [Episode(self.space) for _ in robots]
        call = self._call(self.plain, question, robots, episodes)
        rows: list[list[int]] = [[] for _ in robots]
        for kept in decode(call.parts, call.request):
            for row, new in zip(rows, kept.tokens, strict=True):
                row.extend(new)
        return rows

    def _call(
        self,
        bound: BoundTokens,
        question: ActionQuestion,
        robots: Sequence[Robot],
        episodes: Sequence[Episode],
    ) -> Call:
        """Noise depends on the seed, the robot and how often it was asked, not on its batch."""
        numbers = zip(question.robots, robots, strict=True)
        rows = [number * APART + robot.questions for number, robot in numbers]
        how = (question.sampling, Stop(self.places), question.seed, rows)
        return bound.call(question.inputs, *how, shared={NAME: episodes})

    def partial(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The components so far of every robot, in its units."""
        return [self.units(self.filled(row, None)).reshape(-1)[: len(row)] for row in rows]

    def filled(self, row: Sequence[int], held: Tensor | None) -> Tensor:  # (chunk, D) normalised
        """Values of tokens; what is missing is that of the action before (D,), or 0."""
        rest = torch.zeros(self.space.size, dtype=torch.float64) if held is None else held
        values = rest.repeat(self.chunk)
        values[: len(row)] = self.space.codes.decode(torch.tensor(row, dtype=torch.int64))
        return values.view(self.chunk, self.space.size)

    def units(self, values: Tensor) -> np.ndarray:  # (..., D) normalised -> the robot's units
        found: np.ndarray = self.space.unnormalise(values).numpy()
        return found


def fresh_episodes(space: ActionSpace, batch: int) -> Mapping[str, Any]:
    """Of robots that did nothing yet: for `generate`, which knows no robots."""
    return {NAME: [Episode(space) for _ in range(batch)]}


def answer(
    policy: BoundPolicy,
    question: ActionQuestion,
    robots: Sequence[Robot],
    loop: Loop,
    deadline: Deadline,
) -> list[tuple[np.ndarray, ActionStep]]:
    """The actions (chunk, D) of every robot, in its units, and what they took.

    Where the deadline is near, the components that are not there yet are those of the action
    before; without one before, the question runs to its end.
    """
    for robot in robots:
        robot.settle()
    can_hold = all(robot.episode.actions for robot in robots)
    rows = act(loop(policy.call(question, robots)), len(robots), deadline, can_hold)
    values = [
        policy.filled(taken.tokens, robot.episode.actions[-1] if robot.episode.actions else None)
        for taken, robot in zip(rows, robots, strict=True)
    ]
    actions = [policy.units(one) for one in values]
    latency_ms, is_late = deadline.elapsed_ms, deadline.is_missed
    wanted = policy.greedy(question, robots) if question.is_evaluated else [None] * len(rows)
    found = []
    for robot, taken, own, action, greedy in zip(
        robots, rows, values, actions, wanted, strict=True
    ):
        step = _step(policy, robot.questions, taken, latency_ms, is_late)
        if greedy is not None:
            step = _evaluated(policy, step, action, greedy)
        robot.predicted = list(own)
        robot.questions += 1
        robot.steps.append(step)
        found.append((action, step))
    return found


def _step(
    policy: BoundPolicy, index: int, taken: Taken, latency_ms: float, is_late: bool
) -> ActionStep:
    return ActionStep(
        index=index,
        tokens=tuple(taken.tokens),
        sources=(*taken.sources, *[HELD] * (policy.places - len(taken.tokens))),
        rounds=taken.rounds,
        target_calls=taken.target_calls,
        accepted=tuple(taken.accepted),
        first_error=taken.first_error,
        unverified=taken.unverified,
        held=policy.places - len(taken.tokens),
        latency_ms=latency_ms,
        is_late=is_late,
    )


def _evaluated(
    policy: BoundPolicy, step: ActionStep, action: np.ndarray, greedy: list[int]
) -> ActionStep:
    """With the distance to what the target says by itself, given nothing but the same picture."""
    codes, size = policy.space.codes, policy.space.size
    wanted = policy.filled(greedy, None)
    off = np.abs(action - policy.units(wanted)).reshape(-1, size)
    said = codes.encode(policy.space.normalise(torch.from_numpy(action)))
    bins = (said - codes.encode(wanted)).abs().reshape(-1, size)
    return replace(
        step,
        token_distance=tuple(bins.max(0).values.tolist()),
        action_error=tuple(off.max(0).tolist()),
    )
