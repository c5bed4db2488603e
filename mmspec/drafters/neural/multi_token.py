"""Drafting with multi-token heads on the target's last hidden state (Medusa, VADUSA, Codec-MTP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.growth import News, Nodes
from mmspec.drafters.neural.head_kind import HeadKind
from mmspec.drafters.neural.small_model import (
    committed,
    draft_distribution,
    head_of_target,
)
from mmspec.drafters.neural.target_states import OfLastStates, guided_logits
from mmspec.models.heads.medusa import MedusaHeads
from mmspec.models.heads.multi_token import MultiTokenHeads
from mmspec.models.heads.token_heads import TokenHeads
from mmspec.recipe import STATES, Kit
from mmspec.targets.tokens.context import Context

SEES = STATES
_BIGRAMS = 64  # pairs that random heads have counted


@dataclass(frozen=True, eq=False)
class MultiTokenDraft(OfLastStates):
    """Distributions of the next tokens, all of one state of the target (Cai et al. 2024).

    The newest token was said by the target itself, of its last state; head h speaks of the place h
    tokens behind that one, whatever a draft has put between:

        token     a    b   [x    y    z ]       committed a b, drafted x y z
        state     a    -    -    -    -         b was said by the target of the state of a
        head                1    2    3

    A whole draft so costs one small forward, and nodes of one depth share their distribution. Where
    a gate kept tokens that the target has not read, the state is older and later heads speak in
    time; the last one speaks of all that lies beyond it. Under guidance both branches are read and
    their logits guided by the target's scale.
    """

    heads: TokenHeads
    parallel: ClassVar[bool] = True

    @property
    def reach(self) -> int:
        return self.heads.reach

    def begin(self, context: Context) -> _LastStates:
        states = context.shared["hidden"][:, -1]
        return _LastStates(states, [len(row) for row in context.history])

    def ahead(self, context: Context, state: _LastStates, count: int) -> Tensor:  # (B, count, V)
        """Logits of the next `count` places behind the committed tokens."""
        logits = guided_logits(context, self.heads.logits(state.states, self.backbone.head))
        late = [len(row) - read - 1 for row, read in zip(context.history, state.read, strict=True)]
        if not any(late):
            return logits[:, :count]
        places = torch.tensor(late, device=logits.device)[:, None] + torch.arange(
            count, device=logits.device
        )
        places = places.clamp(0, self.reach - 1)
        return logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))

    def predict_first(self, context: Context, state: _LastStates) -> Categorical:
        state.logits = self.ahead(context, state, self.reach)
        return draft_distribution(context, state.logits[:, :1], committed(context))

    def predict(self, context: Context, state: _LastStates, nodes: Nodes) -> Categorical:
        assert state.logits is not None
        places = (nodes.layout.depths + 1).expand(context.batch, -1)
        wide = places[..., None].expand(-1, -1, state.logits.shape[-1])
        logits = state.logits.gather(1, wide)
        return draft_distribution(context, logits, nodes.prefix(context), nodes.layout.depths + 1)

    def keep(self, context: Context, state: _LastStates, news: News) -> _LastStates:
        """Take the true state of the last token that was read."""
        states = news.scores.features["hidden"]  # (R, N + 1, D)
        last = [path[-1] + 1 if path else 0 for path in news.kept.path]
        last *= len(states) // len(last)  # once for each branch of guidance
        rows = torch.arange(len(states), device=states.device)
        lines = zip(context.history, news.kept.takes_next, strict=True)
        read = [len(row) - taken for row, taken in lines]
        return _LastStates(states[rows, torch.tensor(last, device=states.device)], read)


@dataclass
class _LastStates:
    """What the heads speak of; R rows are B, or 2B with both branches of guidance."""

    states: Tensor  # (R, D)
    read: list[int]  # tokens per row up to the one whose state it is
    logits: Tensor | None = None  # (B, H, V) of this round


def multi_token_heads(kit: Kit) -> Drafter:
    """Heads that say several tokens at once of the target's last state."""
    return head_of_target(kit)


def _counted(heads: MultiTokenHeads, seed: int) -> None:
    """Fill the table of neighbours with pairs, none of them twice."""
    generator = torch.Generator().manual_seed(seed)
    size = heads.config.vocab_size
    count = heads.config.num_bigrams = min(_BIGRAMS, size)
    first = torch.randint(size, (count,), generator=generator)
    often = torch.randint(1, 10, (count,), generator=generator)
    second = (first + torch.arange(count)) % size
    heads.bigrams = torch.stack((first, second, often), 1).int()


MULTI_TOKEN_HEADS = HeadKind(
    MultiTokenHeads, MultiTokenDraft, "set of multi-token heads", fill=_counted
)
MEDUSA_HEADS = HeadKind(MedusaHeads, MultiTokenDraft, "set of Medusa heads")
