"""Drafting with a target's first layers and an adapter after them (Kangaroo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
)
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import build_head_drafter, unread_block
from mmspec.drafters.neural.target_heads import (
    HeadKind,
    accepted_states,
    check_heads,
    guided_logits,
    pad_left,
    read_prompt,
)
from mmspec.models.heads.kangaroo import KangarooAdapter
from mmspec.recipe import STATES, Kit
from mmspec.targets.memory import Memory, TokenBlock, build_block
from mmspec.targets.readers.hooks import LayerStatesHook, layer_states
from mmspec.targets.readers.reader import Reader
from mmspec.targets.rows import drop_row, join_slotted, swap_out
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class KangarooDraft(DraftModel):
    """A target's first layers on its own cache, and an adapter with its own cache.

    Liu et al. 2024. The output of the first layers goes to the adapter, token by token; the target
    then reads the whole draft, and its own early states replace those used for drafting:

        target's cache    a b c | d [x  y]      d newest, x and y drafted: read, not cached
        adapter's         a b c | d [x  y]      from the early state of each

    Raises ValueError at construction for an adapter of another target, for missing layers, and for
    a target whose cache cannot be shared.
    """

    backbone: Reader  # the target's
    adapter: KangarooAdapter
    shallow: Reader = field(init=False, repr=False)  # the first layers
    sees: ClassVar[str] = STATES

    def __post_init__(self) -> None:
        check_adapter(self.adapter, self.backbone)
        draft_reader = SharedBackbone(
            self.backbone, depth=self.adapter.config.exit_layer
        ).draft_reader
        object.__setattr__(self, "shallow", draft_reader)

    @property
    def tap(self) -> str:
        """Name of the early states in the target."""
        return layer_states([self.adapter.config.exit_layer])

    @property
    def required_features(self) -> frozenset[str]:
        return frozenset({self.tap})

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.adapter,)

    def begin(self, context: Context) -> _AdapterState:
        states = context.shared[self.tap]  # (R, L, D)
        memory, _ = read_prompt(self.adapter.config, context, states, self.adapter)
        return _AdapterState(memory, [own[:0] for own in states])

    def predict_first(self, context: Context, state: _AdapterState) -> Categorical:
        early = self._shallow(context, unread_block(context))
        own = [torch.cat((fresh, new)) for fresh, new in zip(state.fresh, early, strict=True)]
        states = pad_left(own)
        layout = build_block([[0] * len(rows) for rows in own], None, state.memory.like)
        states = self._adapt(state, layout, states)[:, -1:]
        state.memory.advance([len(fresh) for fresh in state.fresh])
        state.fresh = [fresh[:0] for fresh in state.fresh]
        return draft_distribution(context, self._logits(context, states), committed_prefix(context))

    def predict(self, context: Context, state: _AdapterState, nodes: DraftNodes) -> Categorical:
        waiting = len(context.pending_tokens()[0])
        early = self._shallow(context, nodes.block(context.memory.like, waiting))
        layout = nodes.block(state.memory.like, waiting).repeat_batch(len(early) // context.batch)
        states = self._adapt(state, layout, early)
        logits = self._logits(context, states)
        return draft_distribution(context, logits, nodes.prefix(context), nodes.ahead(context))

    def keep(self, context: Context, state: _AdapterState, update: DraftUpdate) -> _AdapterState:
        """Append the target's early states of the accepted tokens."""
        new = accepted_states(context, update, self.tap)
        state.fresh = [torch.cat(pair) for pair in zip(state.fresh, new, strict=True)]
        return state

    def _shallow(self, context: Context, layout: TokenBlock) -> Tensor:  # (R, q, D)
        """Early states of a block after the target's cache, which is not changed."""
        with LayerStatesHook(self.shallow, [self.adapter.config.exit_layer], False) as hook:
            self.shallow.read(context.memory, layout)
        return hook.offer(layout.length)

    def _adapt(
        self, state: _AdapterState, layout: TokenBlock, states: Tensor
    ) -> Tensor:  # (R, q, D)
        positions, mask, _ = state.memory.place(layout)
        out: Tensor = self.adapter(states, mask, positions, state.memory.cache)
        return out

    def _logits(self, context: Context, states: Tensor) -> Tensor:  # (R, n, D) -> (B, n, V)
        return guided_logits(context, self.backbone.head(states))


@dataclass
class _AdapterState:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    memory: Memory
    fresh: list[Tensor]  # (n, D) per row: early states of accepted tokens not read yet

    def join(self, other: _AdapterState) -> None:
        """Append the rows of another request."""
        self.memory = join_slotted(self.memory, other.memory)
        self.fresh += other.fresh

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        drop_row(self.memory, row)
        swap_out(self.fresh, row)


def check_adapter(adapter: Any, target: Reader) -> None:
    """Refuse an adapter that was not made for this target. Raises ValueError."""
    check_heads(adapter, target)
    depth, layers = adapter.config.exit_layer, len(target.layers)
    if not 1 <= depth < layers:
        raise ValueError(
            f"exit_layer={depth} leaves no layer before or after the adapter; "
            f"{type(target.model).__name__} has {layers}, give 1 to {layers - 1}"
        )


KANGAROO_ADAPTER = HeadKind(KangarooAdapter, KangarooDraft, "Kangaroo adapter")


def shallow_layers(kit: Kit) -> Drafter:
    """The target's first layers, and an adapter after them."""
    return build_head_drafter(kit)
