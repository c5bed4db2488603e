"""Drafting all tokens of an action in one pass (OpenVLA-OFT as a drafter)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.growth import Chain, Nodes
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.head_kind import HeadKind
from mmspec.drafters.neural.small_model import (
    committed,
    draft_distribution,
    head_of_target,
)
from mmspec.drafters.neural.target_states import OfLastStates, guided_logits
from mmspec.models.heads.action_slots import ActionSlots, slots_of
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context
from mmspec.targets.tokens.turns import prompt_slots


@dataclass(frozen=True, eq=False)
class ActionSlotsDraft(OfLastStates):
    """Distributions of all tokens that an answer still lacks, of one forward of the head per round.

    Tokens that were said, by whomever, fill their slots, so a rejection is answered by drafting the
    rest anew. Nodes of one depth share their distribution. What lies behind the last slot is
    drafted as if it were that one.
    """

    heads: ActionSlots
    parallel: ClassVar[bool] = True

    def begin(self, context: Context) -> _Prompt:
        states = context.shared["hidden"]  # (R, L, D) of what was read just now
        before = prompt_slots(context.request.inputs, context.request.past) - states.shape[1]
        pads = torch.tensor([max(pad - before, 0) for pad in context.memory.padding])
        place = torch.arange(states.shape[1], device=states.device)
        return _Prompt(states, place >= pads.to(place)[:, None])

    def predict_first(self, context: Context, state: _Prompt) -> Categorical:
        self.fill(context, state)
        return draft_distribution(context, self.at(state, 0), committed(context))

    def fill(self, context: Context, state: _Prompt) -> Tensor:  # (B, S, V)
        """Logits of all slots; those of tokens that are said already say nothing."""
        size = self.heads.config.num_slots
        said = context.emitted()
        rows = [[*row[:size], *[0] * (size - len(row))] for row in said]
        branches = len(state.states) // context.batch
        tokens = torch.tensor(rows * branches, device=context.device)
        counts = torch.tensor([len(row) for row in said], device=context.device)
        known = torch.arange(size, device=context.device) < counts.repeat(branches)[:, None]
        out = self.heads(state.states, self.backbone.embed(tokens), known, state.seen)
        state.logits = guided_logits(context, self.backbone.head(out))
        state.next = counts[:, None]
        return state.logits

    def predict(self, context: Context, state: _Prompt, nodes: Nodes) -> Categorical:
        ahead = nodes.layout.depths + 1
        return draft_distribution(context, self.at(state, ahead), nodes.prefix(context), ahead)

    def at(self, state: _Prompt, ahead: Tensor | int) -> Tensor:  # (1 or B, n) -> (B, n, V)
        """Logits of the slots so many tokens behind the next one."""
        assert state.logits is not None
        assert state.next is not None
        places = (state.next + ahead).clamp_max(self.heads.config.num_slots - 1)
        return state.logits.gather(1, places[..., None].expand(-1, -1, state.logits.shape[-1]))


@dataclass
class _Prompt:
    """What the slots stand behind; R rows are B, or 2B with both branches of guidance."""

    states: Tensor  # (R, L, D)
    seen: Tensor  # (R, L) bool, False = padding
    logits: Tensor | None = None  # (B, S, V) of this round
    next: Tensor | None = None  # (B, 1) slot of the token behind the context


def action_slots(kit: Kit) -> Drafter:
    """Parallel slots on the target's states; a chain is no longer than there are slots to fill."""
    assert isinstance(kit.drafter, ActionSlotsDraft)
    shape, most = kit.shape, kit.drafter.heads.config.num_slots
    if isinstance(shape, Chain) and isinstance(shape.length, Fixed):
        kit = replace(kit, shape=Chain(Fixed(min(shape.length.most, most))))
    return head_of_target(kit)


ACTION_SLOTS = HeadKind(
    ActionSlots,
    ActionSlotsDraft,
    "set of action slots",
    sizes=lambda target: {"num_slots": slots_of(target.model.config)},
)
