"""Where a token passes that lies near enough: the windows of a distribution that hold most of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.declared import answered_by
from mmspec.distributions.categorical import Categorical
from mmspec.drafters.growth import DraftModel, Nodes
from mmspec.drafters.neural.action_slots import ActionSlotsDraft
from mmspec.targets.tokens.context import Context

MOST = 4  # windows of a distribution


@dataclass(frozen=True, eq=False)
class WindowedSlots(DraftModel):
    """Distributions of slots for a verifier that lets a token pass within `bins` of the target's own.

    Of a slot's distribution, the middles of the windows that hold most of it take what lies within
    each: the first is the bin that most likely passes, where the likeliest bin alone may stand at
    the edge.
    """

    slots: ActionSlotsDraft
    space: ActionSpace
    bins: Sequence[float]  # per component: how far a token may lie off

    sees = answered_by("slots.sees")
    wants = answered_by("slots.wants")
    reach = answered_by("slots.reach")
    parallel = answered_by("slots.parallel")

    def begin(self, context: Context) -> Any:
        return self.slots.begin(context)

    def predict_first(self, context: Context, state: Any) -> Categorical:
        logits = self.slots.fill(context, state)
        radii = self._radii.to(logits.device)[torch.arange(logits.shape[1]) % self.space.size]
        state.logits = windows(logits, self.space.codes, radii, MOST)
        return Categorical(self.slots.at(state, 0))

    def predict(self, context: Context, state: Any, nodes: Nodes) -> Categorical:
        return Categorical(self.slots.at(state, nodes.layout.depths + 1))

    @cached_property
    def _radii(self) -> Tensor:  # (D,) int64
        most = float(self.space.codes.bins)
        return torch.tensor([int(min(one, most)) for one in self.bins])


def windows(logits: Tensor, codes: ActionCodes, radii: Tensor, most: int) -> Tensor:
    """Log-mass (B, S, V) of each distribution's best windows at their middles, -inf elsewhere.

    A window reaches `radii` (S,) bins to both sides. The first holds most of the distribution, each
    one after it most of what is left; they number `most`, or fewer where nothing is left.

    distribution     .1  .3   0  .2  .2  .2        the likeliest bin is the second; within one bin
    of the within  .4  .4  .5  .4  .6  .4        fifth lies more than within one bin of any other
    """
    distribution = logits[..., codes.first : codes.vocabulary].float().softmax(-1)
    place = torch.arange(codes.bins, device=distribution.device)
    ends = (place + radii[:, None] + 1).clamp_max(codes.bins).expand(len(distribution), -1, -1)
    starts = (place - radii[:, None]).clamp_min(0).expand(len(distribution), -1, -1)
    found = torch.zeros_like(logits, dtype=torch.float32)
    for _ in range(most):
        below = functional.pad(
            distribution.cumsum(-1), (1, 0)
        )  # (B, S, bins + 1): the mass before each bin
        mass, middle = (below.gather(-1, ends) - below.gather(-1, starts)).max(-1, keepdim=True)
        found = found.scatter_add(-1, middle + codes.first, mass.clamp_min(0))
        distribution = distribution.masked_fill((place - middle).abs() <= radii[:, None], 0)
    return found.log()
