"""Accept forecasts that complete an action without verification, now and then (KERV)."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.codes.episodes import Completion, get_episodes
from mmspec.draft import Draft, Gate, Verdict
from mmspec.errors import check_number
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.walk import accept_unverified


@dataclass(frozen=True)
class CompletionGate(Gate):
    """Accept a draft marked as `Completion` unverified, then none for `lockout` steps (KERV).

    Zheng et al. 2026. A forecast based on its own output drifts, so a completion is followed by a
    lockout: 4 steps in the paper; infinity disables the gate. Lossy. Raises ValueError for a
    negative `lockout`.
    """

    lockout: float = 4

    def __post_init__(self) -> None:
        if self.lockout != float("inf"):
            check_number("lockout", self.lockout, 0, example=4)

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        if not isinstance(draft.extras, Completion) or self.lockout == float("inf"):
            return None
        rows = draft.extras.rows.tolist()
        for episode, is_completed in zip(get_episodes(context), rows, strict=True):
            if is_completed:
                episode.locked_until = episode.step + 1 + self.lockout
        return accept_unverified(draft.mask & draft.extras.rows[:, None])
