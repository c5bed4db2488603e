"""The robots that one policy drives: what each did, and whether it is being asked right now."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.errors import described, is_whole
from mmspec.modalities.vla.step_stats import ActionStep

REMEMBERED = 4096  # steps of an episode whose statistics are kept


@dataclass(eq=False)
class Robot:
    """One of them. Actions are normalised."""

    episode: Episode
    predicted: list[Tensor] = field(default_factory=list)  # (D,) each, not known to be carried out
    queue: list[np.ndarray] = field(default_factory=list)  # of a chunk, not handed out yet
    is_observed: bool = False  # whether somebody says what is carried out
    questions: int = 0  # since the reset
    steps: deque[ActionStep] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def settle(self) -> None:
        """Take what was predicted for what was done, where nobody says what was."""
        if not self.is_observed:
            for action in self.predicted:
                self.episode.observe(action)
        self.predicted = []

    def check(self, state: Tensor | None) -> None:  # (S,)
        """Refuse a state now and then, and one of another length. Raises ValueError."""
        done, states = self.episode.actions, self.episode.states
        if done and (state is None) != (len(states) < len(done)):
            raise ValueError(
                f"{len(states)} states came with {len(done)} actions since the reset; give one "
                "with each action, or with none"
            )
        if state is not None and states and len(state) != len(states[-1]):
            raise ValueError(
                f"state of {len(state)} numbers behind states of {len(states[-1])}; give the same "
                "ones all along an episode, or reset() first"
            )

    def observe(self, action: Tensor, state: Tensor | None) -> None:  # (D,) normalised, (S,)
        self.episode.observe(action, state)
        self.predicted, self.is_observed = self.predicted[1:], True

    def reset(self, success: bool | None) -> None:
        self.episode.reset(success)
        self.predicted, self.queue, self.questions = [], [], 0
        self.is_observed = False
        self.steps.clear()


class Robots:
    """Robots by number; made when they are first spoken of.

    While an action of a robot is being predicted, nobody else may ask it, tell it something, or
    reset it: that is refused, not waited for, since a stream may pause in the middle of an action.
    """

    def __init__(self) -> None:
        self._known: dict[int, Robot] = {}
        self._asked: set[int] = set()
        self._lock = Lock()

    @contextmanager
    def asked(self, numbers: Sequence[int], space: ActionSpace) -> Iterator[list[Robot]]:
        """Those robots, for whoever predicts their actions.

        Raises ValueError where one is being asked already, and for one whose episode began with
        other action statistics.
        """
        with self._lock:
            self._check_free(numbers)
            rows = [self._get(number, space) for number in numbers]
            self._asked |= set(numbers)
        try:
            yield rows
        finally:
            with self._lock:
                self._asked -= set(numbers)

    @contextmanager
    def told(
        self, numbers: Sequence[int], space: Callable[[], ActionSpace]
    ) -> Iterator[list[Robot]]:
        """Those robots, for whoever tells them something, which is quickly done.

        A new one has that space; one that is known keeps its own.
        """
        with self._lock:
            self._check_free(numbers)
            known = self._known
            yield [known.get(number) or self._get(number, space()) for number in numbers]

    def steps(self, number: int) -> tuple[ActionStep, ...]:
        """What a robot was asked since its reset; nothing where it is not known."""
        with self._lock:
            return tuple(self._known[number].steps) if number in self._known else ()

    def reset(self, numbers: Sequence[int] | None, success: Sequence[bool | None]) -> None:
        """Begin anew: those robots, or all; `success` is one for all, or one for each."""
        with self._lock:
            chosen = sorted(self._known) if numbers is None else list(numbers)
            self._check_free(chosen)
            ends = list(success) * len(chosen) if len(success) == 1 else list(success)
            if len(ends) != len(chosen):
                raise ValueError(
                    f"success= has {len(ends)} entries for {len(chosen)} robots; give one for "
                    "each, or one for all"
                )
            for number, end in zip(chosen, ends, strict=True):
                if number in self._known:
                    self._known[number].reset(end)

    def _get(self, number: int, space: ActionSpace) -> Robot:
        robot = self._known.get(number)
        begun = robot is not None and (robot.episode.actions or robot.questions)
        if robot is None or (robot.episode.space != space and not begun):
            outcomes = [] if robot is None else robot.episode.outcomes
            robot = self._known[number] = Robot(Episode(space, outcomes=outcomes))
        if robot.episode.space != space:
            raise ValueError(
                f"robot {number} began its episode with other action statistics; call "
                f"reset(robots=[{number}]) before another unnorm_key"
            )
        return robot

    def _check_free(self, numbers: Sequence[int]) -> None:
        busy = sorted(self._asked & set(numbers))
        if busy:
            raise ValueError(
                f"an action of robot {busy[0]} is being predicted already, by another thread or by "
                "a stream; wait for it, or give every thread a robot of its own: robots=[number]"
            )


def numbers_of(robots: Any, count: int | None) -> list[int]:
    """Numbers of robots, one per row; 0, 1, ... if nothing is said. Raises ValueError."""
    if robots is None:
        return list(range(1 if count is None else count))
    robots = robots.tolist() if isinstance(robots, np.ndarray) else robots
    listed = isinstance(robots, Sequence) and not isinstance(robots, str)
    if not listed or not robots or not all(is_whole(one) and one >= 0 for one in robots):
        raise ValueError(
            f"robots={described(robots)} are no numbers of robots; give a list, such as [0, 2]"
        )
    found = [int(one) for one in robots]
    if len(set(found)) < len(found):
        raise ValueError(f"robots={found} names a robot twice; ask for one action of each")
    if count is not None and len(found) != count:
        raise ValueError(
            f"robots={found} names {len(found)} robots for {count} pictures; give one each"
        )
    return found


def rows_of(name: str, values: Any, count: int, width: int | None) -> Tensor:  # (count, width)
    """Numbers of every robot. Raises ValueError for another count or width, or for no numbers."""
    if isinstance(values, Tensor):
        found = values.detach().to("cpu", torch.float64)
    else:
        try:
            found = torch.as_tensor(np.asarray(values, dtype=np.float64))
        except (TypeError, ValueError):
            found = torch.empty(0)
    rows = found[None] if found.dim() == 1 and count == 1 else found
    if rows.dim() != 2 or len(rows) != count or width not in (None, rows.shape[1]):
        wanted = "n" if width is None else str(width)
        raise ValueError(
            f"{name}={described(values)} of shape {tuple(found.shape)} for {count} "
            f"robot{'s' * (count > 1)}; give ({count}, {wanted}) numbers"
        )
    if not bool(rows.isfinite().all()):
        raise ValueError(f"{name}={described(values)} holds NaN or infinity; give finite numbers")
    return rows
