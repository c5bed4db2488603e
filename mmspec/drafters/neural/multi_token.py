"""Drafting with multi-token heads on the target's last hidden state (Medusa, VADUSA, Codec-MTP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import (
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
    predict_ahead,
)
from mmspec.drafters.neural.small_model import build_head_drafter
from mmspec.drafters.neural.target_heads import HeadKind, LastStateModel, guided_logits
from mmspec.models.heads.medusa import MedusaHeads
from mmspec.models.heads.multi_token import MultiTokenHeads
from mmspec.models.heads.token_heads import TokenHeads
from mmspec.recipe import STATES, Kit
from mmspec.targets.rows import CannotJoin, kept_rows, swap_out
from mmspec.targets.tokens.context import Context

SEES = STATES
_BIGRAMS = 64  # bigrams in random heads


@dataclass(frozen=True, eq=False)
class MultiTokenDraft(LastStateModel):
    """Distributions of the next tokens, all from one state of the target (Cai et al. 2024).

    The target predicted the newest token from its last state; head h predicts the token h positions
    after it, independent of the tokens between:

        token     a    b   [x    y    z ]       committed a b, drafted x y z
        state     a    -    -    -    -         b was predicted by the target from the state of a
        head                1    2    3

    So a whole draft costs one small forward, and nodes of one depth share their distribution. Where
    a gate accepted tokens without a forward, the state is older and later heads are used; the last
    head serves all positions beyond it. Under guidance both branches are read and their logits are
    guided by the target's scale.
    """

    heads: TokenHeads
    graphs: Any = field(init=False, repr=False, default=None)  # compiled; see `compile_blocks`
    is_parallel: ClassVar[bool] = True

    @property
    def max_depth_ahead(self) -> int:
        return self.heads.reach

    def begin(self, context: Context) -> _LastStates:
        states = context.shared["hidden"][:, -1]
        if self.graphs is not None:
            self.graphs.follow()
        return _LastStates(states, [len(row) for row in context.history])

    def predict_ahead(
        self, context: Context, state: _LastStates, count: int
    ) -> Tensor:  # (B, count, V)
        """Logits of the next `count` positions after the committed tokens."""
        logits = guided_logits(context, self._predict_heads(state.states))
        num_unread = [
            len(row) - read - 1 for row, read in zip(context.history, state.read, strict=True)
        ]
        if not any(num_unread):
            return logits[:, :count]
        places = torch.tensor(num_unread, device=logits.device)[:, None] + torch.arange(
            count, device=logits.device
        )
        places = places.clamp(0, self.max_depth_ahead - 1)
        return logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))

    def _predict_heads(self, states: Tensor) -> Tensor:  # (R, D) -> (R, H, V)
        def run_eager() -> Tensor:
            return self.heads.logits(states, self.backbone.head)

        found = None if self.graphs is None else self.graphs.run_whole((states,), run_eager)
        return run_eager() if found is None else found[0]

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        def make() -> Callable[[Tensor], tuple[Tensor]]:
            def predict_heads(states: Tensor) -> tuple[Tensor]:
                return (self.heads.logits(states, self.backbone.head),)

            return predict_heads

        graphs = make_graphs(make, lambda: (self.heads, self.backbone.head))
        object.__setattr__(self, "graphs", graphs)
        return ""

    def predict_first(self, context: Context, state: _LastStates) -> Categorical:
        state.logits = self.predict_ahead(context, state, self.max_depth_ahead)
        return draft_distribution(context, state.logits[:, :1], committed_prefix(context))

    def predict(self, context: Context, state: _LastStates, nodes: DraftNodes) -> Categorical:
        assert state.logits is not None
        return predict_ahead(context, state.logits, nodes)

    def keep(self, context: Context, state: _LastStates, update: DraftUpdate) -> _LastStates:
        """Store the target's state of the last token that was read."""
        states = update.scores.features["hidden"]  # (R, N + 1, D)
        last = [path[-1] + 1 if path else 0 for path in update.round.path]
        last *= len(states) // len(last)  # once per branch of guidance
        rows = torch.arange(len(states), device=states.device)
        lines = zip(context.history, update.round.takes_next, strict=True)
        read = [len(row) - taken for row, taken in lines]
        return _LastStates(states[rows, torch.tensor(last, device=states.device)], read)


@dataclass
class _LastStates:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    states: Tensor  # (R, D)
    read: list[int]  # tokens per row up to that of the state
    logits: Tensor | None = None  # (B, H, V) of this round

    def join(self, other: _LastStates) -> None:
        """Append the rows of another request."""
        if len(self.states) != len(self.read) or len(other.states) != len(other.read):
            raise CannotJoin("guidance doubles the rows of these heads")
        self.states = torch.cat((self.states, other.states))
        self.read, self.logits = [*self.read, *other.read], None

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.states = self.states[kept_rows(len(self.read), row)]
        swap_out(self.read, row)


def multi_token_heads(kit: Kit) -> Drafter:
    """Heads that predict several tokens at once from the target's last state."""
    return build_head_drafter(kit)


def _fill_bigrams(heads: MultiTokenHeads, seed: int) -> None:
    """Fill the bigram table with distinct random pairs."""
    generator = torch.Generator().manual_seed(seed)
    size = heads.config.vocab_size
    count = heads.config.num_bigrams = min(_BIGRAMS, size)
    first = torch.randint(size, (count,), generator=generator)
    counts = torch.randint(1, 10, (count,), generator=generator)
    second = (first + torch.arange(count)) % size
    heads.bigrams = torch.stack((first, second, counts), 1).int()


MULTI_TOKEN_HEADS = HeadKind(
    MultiTokenHeads, MultiTokenDraft, "set of multi-token heads", fill=_fill_bigrams
)
MEDUSA_HEADS = HeadKind(MedusaHeads, MultiTokenDraft, "set of Medusa heads")
