"""Drafting all tokens of an action in one pass (OpenVLA-OFT as a drafter)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import DraftNodes, committed_prefix, draft_distribution
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.small_model import build_head_drafter
from mmspec.drafters.neural.target_heads import HeadKind, LastStateModel, guided_logits
from mmspec.drafters.shapes import Chain
from mmspec.models.heads.action_slots import ActionSlots, count_slots
from mmspec.recipe import Kit
from mmspec.targets.tokens.context import Context
from mmspec.targets.tokens.turns import count_prompt_slots


@dataclass(frozen=True, eq=False)
class ActionSlotsDraft(LastStateModel):
    """Distributions of all remaining tokens of an output, from one forward of the head per round.

    Emitted tokens fill their slots, so after a rejection the rest is drafted again. Nodes of one
    depth share their distribution. Positions after the last slot use the distribution of that slot.
    """

    heads: ActionSlots
    is_parallel: ClassVar[bool] = True

    def begin(self, context: Context) -> _SlotState:
        states = context.shared["hidden"]  # (R, L, D) of the tokens just read
        before = count_prompt_slots(context.request.inputs, context.request.past) - states.shape[1]
        pads = torch.tensor([max(pad - before, 0) for pad in context.memory.padding])
        place = torch.arange(states.shape[1], device=states.device)
        return _SlotState(states, place >= pads.to(place)[:, None])

    def predict_first(self, context: Context, state: _SlotState) -> Categorical:
        self.fill(context, state)
        return draft_distribution(context, self.logits_at(state, 0), committed_prefix(context))

    def fill(self, context: Context, state: _SlotState) -> Tensor:  # (B, S, V)
        """Logits of all slots; those of emitted tokens are unused."""
        size = self.heads.config.num_slots
        emitted = context.generated_tokens()
        rows = [[*row[:size], *[0] * (size - len(row))] for row in emitted]
        branches = len(state.states) // context.batch
        tokens = torch.tensor(rows * branches, device=context.device)
        counts = torch.tensor([len(row) for row in emitted], device=context.device)
        known = torch.arange(size, device=context.device) < counts.repeat(branches)[:, None]
        out = self.heads(state.states, self.backbone.embed(tokens), known, state.mask)
        state.logits = guided_logits(context, self.backbone.head(out))
        state.next = counts[:, None]
        return state.logits

    def predict(self, context: Context, state: _SlotState, nodes: DraftNodes) -> Categorical:
        ahead = nodes.layout.depths + 1
        return draft_distribution(
            context, self.logits_at(state, ahead), nodes.prefix(context), ahead
        )

    def logits_at(
        self, state: _SlotState, ahead: Tensor | int
    ) -> Tensor:  # (1 or B, n) -> (B, n, V)
        """Logits of the slots so many positions after the next one."""
        assert state.logits is not None
        assert state.next is not None
        places = (state.next + ahead).clamp_max(self.heads.config.num_slots - 1)
        return state.logits.gather(1, places[..., None].expand(-1, -1, state.logits.shape[-1]))


@dataclass
class _SlotState:
    """The prompt of the slots; R rows are B, or 2B with both branches of guidance."""

    states: Tensor  # (R, L, D)
    mask: Tensor  # (R, L) bool, False = padding
    logits: Tensor | None = None  # (B, S, V) of this round
    next: Tensor | None = None  # (B, 1) slot of the next token


def action_slots(kit: Kit) -> Drafter:
    """Parallel slots on the target's states; a chain is at most as long as there are slots."""
    assert isinstance(kit.drafter, ActionSlotsDraft)
    shape, num_slots = kit.shape, kit.drafter.heads.config.num_slots
    if isinstance(shape, Chain) and isinstance(shape.length, Fixed):
        kit = replace(kit, shape=Chain(Fixed(min(shape.length.max_length, num_slots))))
    return build_head_drafter(kit)


ACTION_SLOTS = HeadKind(
    ActionSlots,
    ActionSlotsDraft,
    "set of action slots",
    sizes=lambda target: {"num_slots": count_slots(target.model.config)},
)
