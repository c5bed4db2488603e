"""Candidates for verifiers with a tolerance: the windows of a distribution with the most mass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec._attributes import delegate_to
from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import DraftModel, DraftNodes
from mmspec.drafters.neural.action_slots import ActionSlotsDraft
from mmspec.targets.tokens.context import Context

MAX_WINDOWS = 4  # windows of a distribution


@dataclass(frozen=True, eq=False)
class WindowedSlots(DraftModel):
    """Distributions of slots for a verifier that accepts a token within `bins` of the target's.

    Of a slot's distribution, the centres of the windows with the most mass take the mass within
    each: the first is the bin most probably accepted, while the most probable bin may lie at the
    edge.
    """

    slots: ActionSlotsDraft
    space: ActionSpace
    bins: Sequence[float]  # per component: the tolerance

    sees = delegate_to("slots.sees")
    required_features = delegate_to("slots.required_features")
    max_depth_ahead = delegate_to("slots.max_depth_ahead")
    is_parallel = delegate_to("slots.is_parallel")

    def begin(self, context: Context) -> Any:
        return self.slots.begin(context)

    def predict_first(self, context: Context, state: Any) -> Categorical:
        logits = self.slots.fill(context, state)
        radii = self._radii.to(logits.device)[torch.arange(logits.shape[1]) % self.space.size]
        state.logits = windows(logits, self.space.codes, radii, MAX_WINDOWS)
        return Categorical(self.slots.logits_at(state, 0))

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        return Categorical(self.slots.logits_at(state, nodes.layout.depths + 1))

    @cached_property
    def _radii(self) -> Tensor:  # (D,) int64
        max_windows = float(self.space.codes.bins)
        return torch.tensor([int(min(one, max_windows)) for one in self.bins])


def windows(logits: Tensor, codes: ActionCodes, radii: Tensor, max_windows: int) -> Tensor:
    """Log-mass (B, S, V) of each distribution's best windows at their centres, -inf elsewhere.

    A window extends `radii` (S,) bins to both sides. The first holds the most mass, each later one
    the most of the rest; there are `max_windows` of them, or fewer where nothing is left.

        distribution   .1  .3   0  .2  .2  .2      the most probable bin is the second; the window
        mass within 1  .4  .4  .5  .4  .6  .4      around the fifth has the most mass
    """
    distribution = logits[..., codes.first : codes.vocabulary].float().softmax(-1)
    bins = torch.arange(codes.bins, device=distribution.device)
    ends = (bins + radii[:, None] + 1).clamp_max(codes.bins).expand(len(distribution), -1, -1)
    starts = (bins - radii[:, None]).clamp_min(0).expand(len(distribution), -1, -1)
    found = torch.zeros_like(logits, dtype=torch.float32)
    for _ in range(max_windows):
        below = functional.pad(
            distribution.cumsum(-1), (1, 0)
        )  # (B, S, bins + 1): the mass before each bin
        mass, middle = (below.gather(-1, ends) - below.gather(-1, starts)).max(-1, keepdim=True)
        found = found.scatter_add(-1, middle + codes.first, mass.clamp_min(0))
        distribution = distribution.masked_fill((bins - middle).abs() <= radii[:, None], 0)
    return found.log()
