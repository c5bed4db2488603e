"""The history of one robot since its reset, for drafters, gates and thresholds of actions.

The caller that drives the robot owns the episode: it calls `observe` with every executed action,
and `reset` between tasks. A call puts one per row into `Request.shared["episodes"]`; drafters,
gates and verifiers store there what they need at the next step (`deviations`, `locked`, `skips`).
Nothing else outlives a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace

NAME = "episodes"  # key of `Request.shared`


@dataclass(eq=False)
class Episode:
    """One robot's actions and states, oldest first."""

    space: ActionSpace
    actions: list[Tensor] = field(default_factory=list)  # (D,) float64 each, normalised
    states: list[Tensor] = field(default_factory=list)  # (S,) float64 each; empty if unknown
    outcomes: list[bool] = field(default_factory=list)  # of earlier tasks, success or not
    deviations: list[float] = field(default_factory=list)  # of accepted tokens, mean per step
    step_deviations: list[float] = field(default_factory=list)  # per token of this step
    locked_until: float = 0  # no gate acts before this step
    skips: int = 0  # steps since the last target call
    memory: dict[str, Any] = field(default_factory=dict)  # by component name, for this task

    @property
    def step(self) -> int:
        """The number of executed actions: the index of the next one."""
        return len(self.actions)

    def observe(self, action: Tensor, state: Tensor | None = None) -> None:  # (D,), (S,)
        """Record an executed action, normalised, and the state after it.

        Raises ValueError for an action of another size or with NaN, and for states with only some
        actions.
        """
        action = torch.as_tensor(action, dtype=torch.float64)
        if action.shape != (self.space.size,) or not bool(action.isfinite().all()):
            raise ValueError(
                f"an action of shape {tuple(action.shape)} was executed, but this robot's have "
                f"{self.space.size} finite components; give those, normalised"
            )
        if (state is None) != (len(self.states) < len(self.actions)) and self.actions:
            raise ValueError(
                f"{len(self.states)} states came with {len(self.actions)} actions; give one with "
                "each action, or with none"
            )
        self.actions.append(action.cpu())
        if state is not None:
            self.states.append(torch.as_tensor(state, dtype=torch.float64).cpu())
        tokens = self.step_deviations
        self.deviations.append(sum(tokens) / len(tokens) if tokens else 0.0)
        self.step_deviations = []

    def reset(self, success: bool | None = None) -> None:
        """Start a new task; `success` is the outcome of the last one, for adaptive thresholds."""
        if success is not None:
            self.outcomes.append(success)
        self.actions, self.states, self.deviations, self.step_deviations = [], [], [], []
        self.locked_until, self.skips, self.memory = 0, 0, {}

    def recent(self, count: int) -> Tensor:  # (n, D) float64, n at most `count`
        """The last actions, oldest first."""
        last = self.actions[-count:] if count > 0 else []
        return torch.stack(last) if last else torch.zeros(0, self.space.size, dtype=torch.float64)


@dataclass
class VisualHistory:
    """Attention and features of this task's images (`Episode.memory`), by slot of the prompt."""

    NAME: ClassVar[str] = "looks"
    attention: Tensor | None = None  # (L,) from the question, at the last step
    frames: list[Tensor] = field(default_factory=list)  # (L, H) features each, oldest first
    back: int = 1  # index of the compared frame, from the end
    is_fine: bool = False  # whether the robot moves precisely


@dataclass(frozen=True)
class Completion:
    """Marks a draft (`Draft.extras`) that completes the output of some rows without the target."""

    rows: Tensor  # (B,) bool


def get_episodes(context: Any) -> Sequence[Episode]:
    """One episode per row of a request. Raises ValueError without episodes, or another number."""
    found: Sequence[Episode] | None = context.shared.get(NAME)
    if found is None:
        raise ValueError(
            "this recipe needs the history of the robot, but the call has no episodes; call "
            "predict_action() of the policy"
        )
    if len(found) != context.batch:
        raise ValueError(f"{len(found)} episodes for {context.batch} rows; give one per row")
    return found
