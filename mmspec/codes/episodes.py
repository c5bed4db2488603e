"""What one robot did since its reset: what drafters, gates and thresholds of actions go by.

Whoever drives the robot owns the episode: it calls `observe` with every action that was carried
out, and `reset` between tasks. A call puts one per row into `Request.shared["episodes"]`; parts
note there what they must know at the next step (`deviations`, `locked`, `skips`), and nothing else
outlives a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.codes.actions import ActionSpace

NAME = "episodes"  # of the entry of `Request.shared`


@dataclass(eq=False)
class Episode:
    """One robot's actions and states, the oldest first."""

    space: ActionSpace
    actions: list[Tensor] = field(
        default_factory=list
    )  # (D,) float64 each, normalised, carried out
    states: list[Tensor] = field(default_factory=list)  # (S,) float64 each; none where unknown
    outcomes: list[bool] = field(default_factory=list)  # of the tasks before, success or not
    deviations: list[float] = field(default_factory=list)  # one per step: kept from the target's
    noted: list[float] = field(default_factory=list)  # the same of the tokens of this step
    locked: float = 0  # no gate acts before this step
    skips: int = 0  # steps since the target was asked last
    memory: dict[str, Any] = field(default_factory=dict)  # of a part, by its name, this task's

    @property
    def step(self) -> int:
        """Actions carried out so far: the number of the next one."""
        return len(self.actions)

    def observe(self, action: Tensor, state: Tensor | None = None) -> None:  # (D,), (S,)
        """Note an action as it was carried out, normalised, and the state that it led to.

        Raises ValueError for an action of another size, NaN among it, or a state now and then.
        """
        action = torch.as_tensor(action, dtype=torch.float64)
        if action.shape != (self.space.size,) or not bool(action.isfinite().all()):
            raise ValueError(
                f"an action of shape {tuple(action.shape)} was carried out, but this robot's have "
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
        kept = self.noted
        self.deviations.append(sum(kept) / len(kept) if kept else 0.0)
        self.noted = []

    def reset(self, success: bool | None = None) -> None:
        """Forget the task; `success` says how it ended, for what learns from that."""
        if success is not None:
            self.outcomes.append(success)
        self.actions, self.states, self.deviations, self.noted = [], [], [], []
        self.locked, self.skips, self.memory = 0, 0, {}

    def recent(self, count: int) -> Tensor:  # (n, D) float64, n at most `count`
        """The last actions, the oldest first."""
        last = self.actions[-count:] if count > 0 else []
        return torch.stack(last) if last else torch.zeros(0, self.space.size, dtype=torch.float64)


@dataclass
class EarlierLooks:
    """What a policy made of the pictures of this task (`Episode.memory`), by slot of its prompt."""

    NAME: ClassVar[str] = "looks"
    attention: Tensor | None = None  # (L,) from the question, at the last step
    frames: list[Tensor] = field(default_factory=list)  # (L, H) features each, the oldest first
    back: int = 1  # which of them counts now, from the end
    is_fine: bool = False  # whether the robot works finely now


@dataclass(frozen=True)
class Completion:
    """Marks a draft (`Draft.extras`) that ends the answer of some rows without the target."""

    rows: Tensor  # (B,) bool


def episodes_of(context: Any) -> Sequence[Episode]:
    """One per row of a request. Raises ValueError where the call gave none, or another number."""
    found: Sequence[Episode] | None = context.shared.get(NAME)
    if found is None:
        raise ValueError(
            "this recipe goes by what the robot did before, and the call gave no episodes; ask the "
            "policy by predict_action()"
        )
    if len(found) != context.batch:
        raise ValueError(f"{len(found)} episodes for {context.batch} rows; give one per row")
    return found
