"""Drafts that their drafter is sure of are kept without asking the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.codes.ctc import Uncertainty, entropies
from mmspec.draft import Draft, Gate, Verdict, categorical
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.walk import unread


@dataclass(frozen=True)
class EntropyGate(Gate):
    """Keep a row's chain unverified if no entropy of it exceeds `threshold` nats.

    Of a drafter that says how unsure it was of a whole draft (CTC-SSD, Saon et al. 2026) that, else
    of the distributions its tokens were drawn from (UGSD, Xue et al. 2026), which greedy drafting
    keeps behind its point masses. Every row decides for itself: those that are unsure keep nothing
    and draft again. Lossy; a threshold below 0 never skips.
    """

    threshold: float

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        if self.threshold < 0 or not draft.nodes or not draft.is_chain:
            return None
        alive = ~torch.tensor(context.finished, device=draft.tokens.device)
        sure = (unsure(draft) <= self.threshold) & draft.mask.any(-1) & alive
        if not bool(sure.any()):
            return None
        return unread(draft.mask & sure[:, None])


def unsure(draft: Draft) -> Tensor:  # (B,) nats
    """The highest entropy of a draft; infinite where its distributions are not known."""
    if isinstance(draft.extras, Uncertainty):
        return draft.extras.nats.to(draft.tokens.device)
    if draft.distribution is None:
        return torch.full(draft.tokens.shape[:1], torch.inf, device=draft.tokens.device)
    each = entropies(categorical(draft.distribution).scores.float().log_softmax(-1))
    return each.masked_fill(~draft.mask, -torch.inf).amax(-1)
