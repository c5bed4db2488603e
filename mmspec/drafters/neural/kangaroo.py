"""Drafting with a target's first layers and an adapter behind them (Kangaroo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.growth import DraftModel, News, Nodes
from mmspec.drafters.neural.head_kind import HeadKind
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import (
    committed,
    draft_distribution,
    head_of_target,
    unread_block,
)
from mmspec.drafters.neural.target_states import (
    check_heads,
    guided_logits,
    kept_states,
    read_prompt,
    side_by_side,
)
from mmspec.models.heads.kangaroo import KangarooAdapter
from mmspec.recipe import STATES, Kit
from mmspec.targets.memory import Memory, TokenBlock, block
from mmspec.targets.readers.hooks import LayerStatesHook, layer_states
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class KangarooDraft(DraftModel):
    """A target's first layers on its own memory, and an adapter with a memory of its own.

    Liu et al. 2024. What the first layers give goes to the adapter, token by token; the target then
    reads the whole draft, and its own early states take the place of those that were drafted from:

        target's memory   a b c | d [x  y]      d newest, x and y drafted: read, not kept
        adapter's         a b c | d [x  y]      of the early state of each

    Raises ValueError at construction for an adapter of another target, for layers that it has not,
    and for a target whose memory cannot be borrowed.
    """

    backbone: Reader  # the target's
    adapter: KangarooAdapter
    shallow: Reader = field(init=False, repr=False)  # the first layers
    sees: ClassVar[str] = STATES

    def __post_init__(self) -> None:
        check_adapter(self.adapter, self.backbone)
        thin = SharedBackbone(self.backbone, depth=self.adapter.config.exit_layer).thin
        object.__setattr__(self, "shallow", thin)

    @property
    def tap(self) -> str:
        """What the target calls its early states."""
        return layer_states([self.adapter.config.exit_layer])

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({self.tap})

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.adapter,)

    def begin(self, context: Context) -> _Early:
        states = context.shared[self.tap]  # (R, L, D)
        memory, _ = read_prompt(self.adapter.config, context, states, self.adapter)
        return _Early(memory, [own[:0] for own in states[:, 0]])

    def predict_first(self, context: Context, state: _Early) -> Categorical:
        early = self._shallow(context, unread_block(context))
        own = [torch.cat((fresh, new)) for fresh, new in zip(state.fresh, early, strict=True)]
        states = side_by_side(own)
        layout = block([[0] * len(rows) for rows in own], None, state.memory.like)
        said = self._adapt(state, layout, states)[:, -1:]
        state.memory.advance([len(fresh) for fresh in state.fresh])
        state.fresh = [fresh[:0] for fresh in state.fresh]
        return draft_distribution(context, self._logits(context, said), committed(context))

    def predict(self, context: Context, state: _Early, nodes: Nodes) -> Categorical:
        waiting = len(context.waiting()[0])
        early = self._shallow(context, nodes.block(context.memory.like, waiting))
        layout = nodes.block(state.memory.like, waiting).tiled(len(early) // context.batch)
        said = self._adapt(state, layout, early)
        logits = self._logits(context, said)
        return draft_distribution(context, logits, nodes.prefix(context), nodes.layout.depths + 1)

    def keep(self, context: Context, state: _Early, news: News) -> _Early:
        """Take the target's early states of what was kept."""
        new = kept_states(context, news, self.tap)
        state.fresh = [torch.cat(pair) for pair in zip(state.fresh, new, strict=True)]
        return state

    def _shallow(self, context: Context, layout: TokenBlock) -> Tensor:  # (R, q, D)
        """Early states of a block behind what the target keeps, which is not changed."""
        with LayerStatesHook(self.shallow, [self.adapter.config.exit_layer], False) as noted:
            self.shallow.read(context.memory, layout)
        return noted.offer(layout.length)

    def _adapt(self, state: _Early, layout: TokenBlock, states: Tensor) -> Tensor:  # (R, q, D)
        positions, mask, _ = state.memory.place(layout)
        out: Tensor = self.adapter(states, mask, positions, state.memory.cache)
        return out

    def _logits(self, context: Context, states: Tensor) -> Tensor:  # (R, n, D) -> (B, n, V)
        return guided_logits(context, self.backbone.head(states))


@dataclass
class _Early:
    """What the adapter remembers; R rows are B, or 2B with both branches of guidance."""

    memory: Memory
    fresh: list[Tensor]  # (n, D) per row: early states of kept tokens that it has not read


def check_adapter(adapter: Any, target: Reader) -> None:
    """Refuse an adapter that was not made for this target. Raises ValueError."""
    check_heads(adapter, target)
    depth, layers = adapter.config.exit_layer, len(target.layers)
    if not 1 <= depth < layers:
        raise ValueError(
            f"exit_layer={depth} leaves no layer behind the adapter, or none before it; "
            f"{type(target.model).__name__} has {layers}, give 1 to {layers - 1}"
        )


KANGAROO_ADAPTER = HeadKind(KangarooAdapter, KangarooDraft, "Kangaroo adapter")


def shallow_layers(kit: Kit) -> Drafter:
    """The target's first layers, and an adapter behind them."""
    return head_of_target(kit)
