"""Drafting with an LSTM on the target's last state (OWL)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.drafters.draft_model import (
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
)
from mmspec.drafters.neural.target_heads import (
    HeadKind,
    LastStateModel,
    accepted_states,
    guided_logits,
)
from mmspec.models.heads.owl import OwlHead
from mmspec.targets.rows import kept_rows
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class OwlDraft(LastStateModel):
    """Distributions of the next tokens, from one state of the target and an LSTM over the draft.

    Lee et al. 2025. Every node continues the LSTM of its parent, so drafts may be of any depth:

        token     a    b   [x    y    z ]       committed a b, drafted x y z
        LSTM           0    1    2              0 from the state of a, reads b and predicts x

    It caches nothing. Where a gate accepted tokens without a forward, the last known state is used.
    Under guidance both branches are read.
    """

    heads: OwlHead

    def begin(self, context: Context) -> _OwlState:
        return _OwlState(context.shared["hidden"][:, -1])

    def predict_first(self, context: Context, state: _OwlState) -> Categorical:
        newest = torch.tensor([row[-1:] for row in context.history], device=context.device)
        state.levels = []
        hidden, cell = self.heads.begin(state.states)
        logits = self._step(context, state, newest, hidden[:, :, None], cell[:, :, None])
        return draft_distribution(context, logits, committed_prefix(context))

    def predict(self, context: Context, state: _OwlState, nodes: DraftNodes) -> Categorical:
        parents = nodes.layout.parents.expand(len(nodes.tokens), -1)
        parents = parents.repeat(len(state.states) // len(parents), 1)  # once per branch
        hidden, cell = (
            _gather(torch.cat(own, 2), parents) for own in zip(*state.levels, strict=True)
        )
        logits = self._step(context, state, nodes.tokens, hidden, cell)
        depths = nodes.layout.depths + 1
        return draft_distribution(context, logits, nodes.prefix(context), depths)

    def keep(self, context: Context, state: _OwlState, update: DraftUpdate) -> _OwlState:
        """Store the target's state of the last token that was read."""
        new = accepted_states(context, update, "hidden")
        pairs = zip(new, state.states, strict=True)
        return _OwlState(torch.stack([own[-1] if len(own) else last for own, last in pairs]))

    def _step(
        self, context: Context, state: _OwlState, tokens: Tensor, hidden: Tensor, cell: Tensor
    ) -> Tensor:  # (B, n, V)
        """Read tokens (B, n) after LSTM states (layers, R, n, S)."""
        rows, count = hidden.shape[1:3]
        embeds = self.backbone.embed(tokens).repeat(rows // len(tokens), 1, 1)
        memory = (hidden.flatten(1, 2), cell.flatten(1, 2))
        out, memory = self.heads(embeds.flatten(0, 1)[:, None], memory)
        new_hidden, new_cell = (one.unflatten(1, (rows, count)) for one in memory)
        state.levels.append((new_hidden, new_cell))
        logits = self.backbone.head(out[:, 0].unflatten(0, (rows, count)))
        return guided_logits(context, logits)


@dataclass
class _OwlState:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    states: Tensor  # (R, D) the target's, of the last token that it has read
    levels: list[tuple[Tensor, Tensor]] = field(
        default_factory=list
    )  # (layers, R, n, S) x2 each: of the nodes read in this round, the newest token first

    def join(self, other: _OwlState) -> None:
        """Append the rows of another request."""
        self.states, self.levels = torch.cat((self.states, other.states)), []

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.states, self.levels = self.states[kept_rows(len(self.states), row)], []


def _gather(states: Tensor, index: Tensor) -> Tensor:  # (layers, R, m, S), (R, n)
    index = index[None, ..., None].expand(len(states), -1, -1, states.shape[-1])
    return states.gather(2, index)


OWL_HEAD = HeadKind(OwlHead, OwlDraft, "OWL head")
