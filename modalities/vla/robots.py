"""The robots of a policy: their history, and which of them have a prediction in progress."""

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
from mmspec.errors import format_value, is_integer
from mmspec.modalities.vla.step_stats import ActionStep

MAX_STEPS = 4096  # steps of an episode whose statistics are kept


@dataclass(eq=False)
class Robot:
    """The state of one robot. Actions are normalised."""

    episode: Episode
    predicted: list[Tensor] = field(default_factory=list)  # (D,) each, not yet executed
    queue: list[np.ndarray] = field(default_factory=list)  # rest of a chunk
    is_observed: bool = False  # whether executed actions are reported by `observe`
    num_requests: int = 0  # since the reset
    steps: deque[ActionStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))

    def commit_predictions(self) -> None:
        """Record predicted actions as executed, unless `observe` reports them."""
        if not self.is_observed:
            for action in self.predicted:
                self.episode.observe(action)
        self.predicted = []

    def check(self, state: Tensor | None) -> None:  # (S,)
        """Raises ValueError for a state given only sometimes, or of another length."""
        done, states = self.episode.actions, self.episode.states
        if done and (state is None) != (len(states) < len(done)):
            raise ValueError(
                f"{len(states)} states came with {len(done)} actions since the reset; give one "
                "with each action, or with none"
            )
        if state is not None and states and len(state) != len(states[-1]):
            raise ValueError(
                f"state of {len(state)} numbers after states of {len(states[-1])}; give the same "
                "length in an episode, or reset() first"
            )

    def observe(self, action: Tensor, state: Tensor | None) -> None:  # (D,) normalised, (S,)
        self.episode.observe(action, state)
        self.predicted, self.is_observed = self.predicted[1:], True

    def reset(self, success: bool | None) -> None:
        self.episode.reset(success)
        self.predicted, self.queue, self.num_requests = [], [], 0
        self.is_observed = False
        self.steps.clear()


class Robots:
    """Robots by number, created on first use.

    While an action of a robot is being predicted, other calls for it are refused with an error.
    They do not wait, since a stream may pause in the middle of an action.
    """

    def __init__(self) -> None:
        self._known: dict[int, Robot] = {}
        self._reserved: set[int] = set()
        self._lock = Lock()

    @contextmanager
    def reserve(self, numbers: Sequence[int], space: ActionSpace) -> Iterator[list[Robot]]:
        """Reserve robots while their actions are predicted.

        Raises ValueError if one is reserved already, or began its episode with other action
        statistics.
        """
        with self._lock:
            self._check_free(numbers)
            rows = [self._get(number, space) for number in numbers]
            self._reserved |= set(numbers)
        try:
            yield rows
        finally:
            with self._lock:
                self._reserved -= set(numbers)

    @contextmanager
    def access(
        self, numbers: Sequence[int], space: Callable[[], ActionSpace]
    ) -> Iterator[list[Robot]]:
        """Lock robots for a short update; new ones get `space`, others keep their own."""
        with self._lock:
            self._check_free(numbers)
            known = self._known
            yield [known.get(number) or self._get(number, space()) for number in numbers]

    def steps(self, number: int) -> tuple[ActionStep, ...]:
        """Steps of a robot since its reset; empty if it is not known."""
        with self._lock:
            return tuple(self._known[number].steps) if number in self._known else ()

    def reset(self, numbers: Sequence[int] | None, success: Sequence[bool | None]) -> None:
        """Start new episodes of the given robots, or all; `success` is one for all, or one each."""
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
        has_begun = robot is not None and (robot.episode.actions or robot.num_requests)
        if robot is None or (robot.episode.space != space and not has_begun):
            outcomes = [] if robot is None else robot.episode.outcomes
            robot = self._known[number] = Robot(Episode(space, outcomes=outcomes))
        if robot.episode.space != space:
            raise ValueError(
                f"robot {number} began its episode with other action statistics; call "
                f"reset(robots=[{number}]) before another unnorm_key"
            )
        return robot

    def _check_free(self, numbers: Sequence[int]) -> None:
        busy = sorted(self._reserved & set(numbers))
        if busy:
            raise ValueError(
                f"an action of robot {busy[0]} is already being predicted, by another thread or a "
                "stream; wait for it, or use one robot per thread: robots=[number]"
            )


def parse_robots(robots: Any, count: int | None) -> list[int]:
    """Numbers of robots, one per row, by default 0, 1, ... Raises ValueError for bad numbers."""
    if robots is None:
        return list(range(1 if count is None else count))
    robots = robots.tolist() if isinstance(robots, np.ndarray) else robots
    is_list = isinstance(robots, Sequence) and not isinstance(robots, str | bytes)
    if not is_list or not robots or not all(is_integer(one) and one >= 0 for one in robots):
        raise ValueError(
            f"robots={format_value(robots)} are not numbers of robots; give a list, such as [0, 2]"
        )
    found = [int(one) for one in robots]
    if len(set(found)) < len(found):
        raise ValueError(f"robots={found} names a robot twice; request one action of each")
    if count is not None and len(found) != count:
        raise ValueError(
            f"robots={found} names {len(found)} robots for {count} rows; give one each"
        )
    return found


def count_rows(action: Any) -> int:
    """The rows of (B, D) numbers; 1 for anything else, which `parse_rows` refuses."""
    try:
        shape = np.shape(action)
    except ValueError:  # rows of several lengths
        shape = ()
    return shape[0] if len(shape) == 2 else 1


def parse_rows(name: str, values: Any, count: int, width: int | None) -> Tensor:  # (count, width)
    """Convert to rows, one per robot. Raises ValueError for other shapes, NaN and infinity."""
    if isinstance(values, Tensor):
        found = values.detach().to("cpu", torch.float64)
    else:
        try:
            found = torch.as_tensor(np.asarray(values, dtype=np.float64))
        except (TypeError, ValueError):
            found = torch.empty(0)
    rows = found[None] if found.dim() == 1 and count == 1 else found
    is_shaped = rows.dim() == 2 and len(rows) == count and rows.numel() > 0
    if not is_shaped or width not in (None, rows.shape[1]):
        columns = "n" if width is None else str(width)
        raise ValueError(
            f"{name}={format_value(values)} of shape {tuple(found.shape)} for {count} "
            f"robot{'s' * (count > 1)}; give ({count}, {columns}) numbers"
        )
    if not bool(rows.isfinite().all()):
        raise ValueError(
            f"{name}={format_value(values)} holds NaN or infinity; give finite numbers"
        )
    return rows
