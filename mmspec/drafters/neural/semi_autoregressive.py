"""Drafting block by block with a head that predicts several states at once (SpecFLASH)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    Layout,
    committed_prefix,
    draft_distribution,
)
from mmspec.drafters.neural.feature_head import FeatureDraft, HeadState, feature_head
from mmspec.drafters.neural.target_heads import HeadKind
from mmspec.drafters.shapes import Chain, StaticTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.semi_autoregressive import SemiAutoregressiveHead
from mmspec.recipe import STATES, Kit
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class SemiAutoregressiveDraft(DraftModel):
    """Blocks of K draft tokens, each by one forward of a head (Wang et al. 2025).

    The last committed token is the root of the first block, a node of level K - 1 that of a second
    one. From a root the head predicts K states, and so the distributions of the K levels after it,
    independent of the tokens between:

        level           0   1   2 | 3   4   5          K = 3
        token       c   x   y   z   u   v   w
        predicted by    c   c   c   z   z   z          a forward reads c, another one x y z

    A second forward reads all nodes of the first block, with the states predicted for them. Nodes
    of one level have roots of their own in a tree. The distributions are those that tokens are
    drawn from, so this is exact with every lossless verifier.

    Levels are read one after the other: chains, static and dynamic trees.
    """

    backbone: Reader  # the target's
    head: SemiAutoregressiveHead
    slots: FeatureDraft = field(init=False, repr=False)  # reads the slots of the head
    sees: ClassVar[str] = STATES

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", FeatureDraft(self.backbone, self.head))

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    @property
    def required_features(self) -> frozenset[str]:
        return self.slots.required_features

    def begin(self, context: Context) -> _BlockState:
        return _BlockState(self.slots.begin(context))

    def predict_first(self, context: Context, state: _BlockState) -> Categorical:
        hidden = self.slots.read_committed(context, state.slots)[:, -1:]
        state.start_round(self.head.predict_block(hidden))
        assert state.ahead is not None
        logits = self.slots.logits(context, state.ahead[:, :, 0])
        return draft_distribution(context, logits, committed_prefix(context))

    def predict(self, context: Context, state: _BlockState, nodes: DraftNodes) -> Categorical:
        level, size = state.level, self.head.config.block
        state.level += 1
        state.waiting.append((nodes, state.states_at(nodes.layout, level % size)))
        if (level + 1) % size:
            states = state.states_at(nodes.layout, (level + 1) % size)
        else:
            states = self._read_block(context, state)
        logits = self.slots.logits(context, states)
        depths = nodes.layout.depths + 1
        return draft_distribution(context, logits, nodes.prefix(context), depths)

    def _read_block(self, context: Context, state: _BlockState) -> Tensor:  # (R, n, D)
        """Read the nodes of a whole block; its last level becomes the roots of the next one."""
        read, own = zip(*state.waiting, strict=True)
        first, last = state.num_read, read[-1].layout.visible.shape[2]
        layout = Layout(
            torch.cat([_expand(one.layout.depths, context.batch) for one in read], 1),
            torch.cat([_widen(one.layout.visible, context.batch, last) for one in read], 1),
        )
        tokens = torch.cat([one.tokens for one in read], 1)
        states = torch.cat(own, 1)
        block = DraftNodes(tokens, layout).block(state.slots.memory.like)
        branches = len(states) // context.batch
        hidden = self.slots.read_block(state.slots, block.repeat_batch(branches), states)
        count = read[-1].tokens.shape[1]
        state.ahead = self.head.predict_block(hidden[:, -count:])
        state.roots = slice(last - count, last)
        state.num_read = first + tokens.shape[1]
        state.waiting = []
        found: Tensor = state.ahead[:, :, 0]
        return found

    def keep(self, context: Context, state: _BlockState, update: DraftUpdate) -> _BlockState:
        """Append the target's states of the accepted tokens; the cached draft is dropped."""
        return _BlockState(self.slots.keep(context, state.slots, update))


@dataclass
class _BlockState:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    slots: HeadState
    ahead: Tensor | None = None  # (R, m, K, D): states predicted from the m roots of a block
    roots: slice | None = None  # of the nodes of the round, in reading order; None = the context
    level: int = 0  # levels of nodes that were given in this round
    num_read: int = 0  # nodes that the head has read in this round
    waiting: list[tuple[DraftNodes, Tensor]] = field(default_factory=list)  # with their states

    def start_round(self, ahead: Tensor) -> None:
        self.ahead, self.roots, self.level, self.num_read, self.waiting = ahead, None, 0, 0, []

    def states_at(self, layout: Layout, offset: int) -> Tensor:  # (R, n, D)
        """States predicted `offset` tokens after the root of each node of a level."""
        assert self.ahead is not None
        states = self.ahead[:, :, offset]
        count = layout.depths.shape[1]
        if self.roots is None:
            return states.expand(-1, count, -1)
        above = layout.visible[..., self.roots].to(torch.int8).argmax(-1)  # (1 or B, n)
        repeats = len(states) // len(above)
        index = above.repeat(repeats, 1)[..., None].expand(-1, -1, states.shape[-1])
        return states.gather(1, index)

    def join(self, other: _BlockState) -> None:
        """Append the rows of another request."""
        self.slots.join(other.slots)
        self.ahead, self.waiting = None, []

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.slots.drop(row)
        self.ahead, self.waiting = None, []


def _expand(values: Tensor, batch: int) -> Tensor:  # (1 or B, ...) -> (B, ...)
    return values.expand(batch, *values.shape[1:])


def _widen(visible: Tensor, batch: int, width: int) -> Tensor:  # (1 or B, n, w) -> (B, n, width)
    return _expand(functional.pad(visible, (0, width - visible.shape[2])), batch)


SEMI_AUTOREGRESSIVE_HEAD = HeadKind(
    SemiAutoregressiveHead, SemiAutoregressiveDraft, "semi-autoregressive head"
)


def block_head(kit: Kit) -> Drafter:
    """A head that predicts one state, or a block of states, per forward (SpecFLASH)."""
    is_levelled = isinstance(kit.shape, Chain | StaticTree | DynamicTree)
    if isinstance(kit.drafter, SemiAutoregressiveDraft) and not is_levelled:
        raise ValueError(
            f"a semi-autoregressive head drafts level by level, not a {type(kit.shape).__name__}; "
            "give length=, or a tree of child counts"
        )
    made: Any = feature_head(kit)
    drafter: Drafter = made
    return drafter
