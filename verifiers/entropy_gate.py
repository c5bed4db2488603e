"""Accept drafts of low entropy without verification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.codes.ctc import Uncertainty, entropies
from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Draft, Gate, Verdict
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.walk import accept_unverified


@dataclass(frozen=True)
class EntropyGate(Gate):
    """Accept a row's chain unverified if none of its entropies exceeds `threshold` nats.

    The entropy is that of `Uncertainty` if the drafter gives one per draft (CTC-SSD, Saon et al.
    2026), else that of the distributions its tokens were sampled from (UGSD, Xue et al. 2026); for
    greedy drafting, of the scores of the point masses. Rows are independent: those above the
    threshold accept nothing and draft again. Lossy; a threshold below 0 never skips.
    """

    threshold: float

    def skip(self, context: Context, draft: Draft) -> Verdict | None:
        if self.threshold < 0 or not draft.nodes or not draft.is_chain:
            return None
        alive = ~torch.tensor(context.finished, device=draft.tokens.device)
        passed = (max_entropy(draft) <= self.threshold) & draft.mask.any(-1) & alive
        if not bool(passed.any()):
            return None
        return accept_unverified(draft.mask & passed[:, None])


def max_entropy(draft: Draft) -> Tensor:  # (B,) nats
    """The highest entropy of a draft; infinite if it has no distributions."""
    if isinstance(draft.extras, Uncertainty):
        return draft.extras.nats.to(draft.tokens.device)
    if draft.distribution is None:
        return torch.full(draft.tokens.shape[:1], torch.inf, device=draft.tokens.device)
    each = entropies(as_categorical(draft.distribution).scores.float().log_softmax(-1))
    return each.masked_fill(~draft.mask, -torch.inf).amax(-1)
