"""What completes an action is kept without asking the target, now and then (KERV)."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.codes.episodes import Completion, episodes_of
from mmspec.draft import Draft, Gate, Verdict
from mmspec.errors import check_number
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.walk import unread


@dataclass(frozen=True)
class CompletionGate(Gate):
    """Keep a draft marked as `Completion` unread, then none for `lockout` steps (KERV).

    Zheng et al. 2026. A forecast that feeds on its own output drifts, so a robot that was completed
    is locked out: 4 steps in the paper; with infinitely many nothing is ever kept so. Lossy. Raises
    ValueError below 0.
    """

    lockout: float = 4

    def __post_init__(self) -> None:
        if self.lockout != float("inf"):
            check_number("lockout", self.lockout, 0, example=4)

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        if not isinstance(draft.extras, Completion) or self.lockout == float("inf"):
            return None
        rows = draft.extras.rows.tolist()
        for episode, is_completed in zip(episodes_of(context), rows, strict=True):
            if is_completed:
                episode.locked = episode.step + 1 + self.lockout
        return unread(draft.mask & draft.extras.rows[:, None])
