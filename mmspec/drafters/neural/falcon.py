"""Drafting block by block with a Falcon head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmspec._attributes import delegate_to
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
from mmspec.drafters.neural.head_prompt import head_prompt, read_target_prompt
from mmspec.drafters.neural.target_heads import HeadKind, pad_left
from mmspec.drafters.shapes import Chain, StaticTree
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.falcon import Carry, FalconHead
from mmspec.recipe import STATES, Kit
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, TokenBlock, build_block
from mmspec.targets.readers.backbone import MAX_RESERVED_SLOTS
from mmspec.targets.readers.reader import Reader
from mmspec.targets.rows import kept_rows, swap_out
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class FalconDraft(DraftModel):
    """Blocks of K draft tokens, each by one run of a Falcon head (Gao et al. 2024).

    A round reads the new tokens, and again the K - 1 slots before them, so that the last K slots
    are a block:

        slot      b|a  [c|b   d|c   e|d]     K = 3, committed a .. e of which d and e are new
        predicts        f     g     h        the first block of the draft

    A second block reads the path of K tokens to each node at the end of the first one, with the
    states predicted for them: paths of a tree do not share slots, as a slot also attends to later
    ones of its path. Only true slots stay in the cache.

    Levels are read one after the other: chains, static and dynamic trees. Raises ValueError at
    construction for a head of another target.
    """

    backbone: Reader  # the target's
    head: FalconHead
    slots: FeatureDraft = field(init=False, repr=False)  # keeps the target's states
    sees: ClassVar[str] = STATES

    required_features = delegate_to("slots.required_features")

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", FeatureDraft(self.backbone, self.head))

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    def begin(self, context: Context) -> FalconState:
        wanted = self.required_features - {self.slots.tap}
        prompt = read_target_prompt(context, self.slots.tap, wanted)
        read = head_prompt(self.head, self.backbone, prompt)
        count = read.embeds.shape[1]
        room = count + 1 + min(context.request.max_new_tokens + 64, MAX_RESERVED_SLOTS)
        cache = SlotCache(self.head.config, room)
        memory = Memory(cache, count, read.pads, read.rope, read.states[:0])
        memory.offsets, memory.axes = read.offsets, 3 if read.positions.dim() == 3 else 1
        last = list(self.head.fuse(prompt.features[:, -1:]))
        kept = HeadState(memory, last, [*last], list(context.prompt))
        width = self.head.config.hidden_size
        if not count:
            shape = (self.head.config.lstm_layers, len(last), width)
            empty = read.states.new_zeros(shape)
            return FalconState(kept, (empty, empty), [own[:0] for own in last])
        cache.plan_uniform(0, count)
        inputs, carry = self.head.recur(
            self.head.fuse_inputs(read.embeds, read.states), None, read.pads
        )
        mask = read.attention_mask if any(read.pads) else None
        self.head.attend(inputs, mask, read.positions, cache)
        pairs = zip(inputs, read.pads, strict=True)
        return FalconState(kept, carry, [self._recent(own[pad:]) for own, pad in pairs])

    def _recent(self, inputs: Tensor) -> Tensor:  # (n, D) -> (at most K - 1, D)
        return inputs[max(len(inputs) - self.head.config.block + 1, 0) :]

    def predict_first(self, context: Context, state: FalconState) -> Categorical:
        state.start_round(self._read_committed(context, state))
        assert state.ahead is not None
        logits = self.slots.logits(context, state.ahead[:, :, 0])
        return draft_distribution(context, logits, committed_prefix(context))

    def _read_committed(self, context: Context, state: FalconState) -> Tensor:  # (R, K, D)
        """Read the new tokens and the slots before them; states of the next K tokens."""
        size, memory = self.head.config.block, state.slots.memory
        unread = self.slots.unread_block(context, state.slots)
        embeds, fresh = self.backbone.embed(unread.block.tokens), unread.more[0]
        counts = [max(count, 1) for count in unread.counts]  # a finished row repeats its last token
        pads = [unread.block.length - count for count in counts]
        inputs, state.carry = self.head.recur(
            self.head.fuse_inputs(embeds, fresh), state.carry, pads
        )
        new = zip(state.recent, inputs, pads, strict=True)
        rows = [torch.cat((recent, own[pad:])) for recent, own, pad in new]
        memory.advance([-len(recent) for recent in state.recent])
        block = build_block([[0] * len(own) for own in rows], None, memory.like)
        corner = block.corner.clone()
        corner[:, -size:] = True  # the relaxed causal mask
        out = self._attend(memory, replace(block, corner=corner), pad_left(rows))[:, -size:]
        memory.advance([len(recent) for recent in state.recent])
        state.recent = [self._recent(own) for own in rows]
        unread.commit()
        return functional.pad(out, (0, 0, size - out.shape[1], 0))  # a prompt shorter than a block

    def predict(self, context: Context, state: FalconState, nodes: DraftNodes) -> Categorical:
        level, size = state.level, self.head.config.block
        state.level += 1
        state.waiting.append((nodes, state.states_at(nodes.layout, level % size)))
        if (level + 1) % size:
            states = state.states_at(nodes.layout, (level + 1) % size)
        else:
            states = self._read_paths(context, state)
        logits = self.slots.logits(context, states)
        depths = nodes.layout.depths + 1
        return draft_distribution(context, logits, nodes.prefix(context), depths)

    def _read_paths(self, context: Context, state: FalconState) -> Tensor:  # (R, n, D)
        """Read the paths of a block to the n nodes of its last level: roots of the next one."""
        size, memory = self.head.config.block, state.slots.memory
        last = state.waiting[-1][0].layout
        tokens = torch.cat([nodes.tokens for nodes, _ in state.waiting], 1)
        states = torch.cat([own for _, own in state.waiting], 1)
        total, branches = last.visible.shape[2], len(states) // context.batch
        first = total - tokens.shape[1]
        paths = _path_indices(last.visible[..., first:], size).expand(context.batch, -1, -1)
        index, count = paths.flatten(1), paths.shape[1]
        embeds = self.backbone.embed(tokens.gather(1, index)).repeat(branches, 1, 1)
        states = states.gather(1, index.repeat(branches, 1)[..., None].expand_as(embeds))
        roots = state.root_indices(last)  # (1 or B, n)
        carry = tuple(_gather_rows(one, roots, branches) for one in state.roots_carry())
        inputs = self.head.fuse_inputs(embeds, states).unflatten(1, (count, size)).flatten(0, 1)
        inputs, (hidden, cell) = self.head.recur(inputs, (carry[0], carry[1]))
        inputs = inputs.unflatten(0, (-1, count)).flatten(1, 2)
        seen = state.seen_by_roots(roots, count, last.visible)
        layout = _path_layout(seen, state.level - size, size)
        ids = torch.zeros(context.batch, count * size, dtype=torch.int64, device=tokens.device)
        block = DraftNodes(ids, layout).block(memory.like).repeat_batch(branches)
        out = self._attend(memory, block, inputs)
        state.ahead = out.unflatten(1, (count, size))
        state.roots, state.seen, state.waiting = slice(total - count, total), layout.visible, []
        state.seen = state.seen[:, size - 1 :: size]  # of every path's last slot
        shape = (len(hidden), -1, count, hidden.shape[-1])
        state.branch_carry = (hidden.view(shape), cell.view(shape))
        found: Tensor = state.ahead[:, :, 0]
        return found

    def _attend(self, memory: Memory, block: TokenBlock, inputs: Tensor) -> Tensor:  # (R, q, D)
        positions, mask, _ = memory.place(block)
        if memory.axes > 1:
            positions = memory.spread_axes(positions)
        return self.head.attend(inputs, mask, positions, memory.cache)

    def keep(self, context: Context, state: FalconState, update: DraftUpdate) -> FalconState:
        """Append the target's states of the accepted tokens; the cached draft is dropped."""
        kept = self.slots.keep(context, state.slots, update)
        return FalconState(kept, state.carry, state.recent)


@dataclass
class FalconState:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    slots: HeadState
    carry: Carry  # (layers, R, D) each: the LSTM after all slots that were read
    recent: list[Tensor]  # (at most K - 1, D) per row: inputs of the layer for the last slots
    ahead: Tensor | None = None  # (R, m, K, D): states predicted from the m roots of a block
    roots: slice | None = None  # of the nodes of the round, in reading order; None = the context
    seen: Tensor | None = None  # (1 or B, m, slots read) bool: slots that each root attends to
    branch_carry: Carry | None = None  # (layers, R, m, D) each: the LSTM after each root
    level: int = 0  # levels of nodes that were given in this round
    waiting: list[tuple[DraftNodes, Tensor]] = field(default_factory=list)  # with their states

    def start_round(self, ahead: Tensor) -> None:  # (R, K, D)
        self.ahead, self.roots, self.seen, self.branch_carry = ahead[:, None], None, None, None
        self.level, self.waiting = 0, []

    def states_at(self, layout: Layout, offset: int) -> Tensor:  # (R, n, D)
        """States predicted `offset` tokens after the root of each node of a level."""
        assert self.ahead is not None
        states = self.ahead[:, :, offset]
        index = self.root_indices(layout)
        index = index.repeat(len(states) // len(index), 1)
        return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))

    def root_indices(self, layout: Layout) -> Tensor:  # (1 or B, n)
        """Index of the root of each node of a level."""
        if self.roots is None:
            return torch.zeros_like(layout.depths)
        return layout.visible[..., self.roots].to(torch.int8).argmax(-1)

    def roots_carry(self) -> Carry:  # (layers, R, m, D) each
        """The LSTM's states after each root."""
        if self.branch_carry is not None:
            return self.branch_carry
        hidden, cell = self.carry
        return hidden[:, :, None], cell[:, :, None]

    def seen_by_roots(self, roots: Tensor, count: int, like: Tensor) -> Tensor:
        """Slots (1 or B, count, read before) of the round that `roots` attend to; bool."""
        if self.seen is None:
            return like.new_zeros(len(roots), count, 0)
        seen = self.seen.expand(max(len(roots), len(self.seen)), -1, -1)
        index = roots.expand(len(seen), -1)[..., None].expand(-1, -1, seen.shape[-1])
        return seen.gather(1, index)

    def join(self, other: FalconState) -> None:
        """Append the rows of another request."""
        self.slots.join(other.slots)
        pairs = zip(self.carry, other.carry, strict=True)
        hidden, cell = (torch.cat(pair, 1) for pair in pairs)
        self.carry, self.recent = (hidden, cell), [*self.recent, *other.recent]
        self.ahead, self.waiting = None, []

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        kept = kept_rows(len(self.recent), row)
        self.carry = (self.carry[0][:, kept], self.carry[1][:, kept])
        swap_out(self.recent, row)
        self.slots.drop(row)
        self.ahead, self.waiting = None, []


def _path_indices(visible: Tensor, size: int) -> Tensor:  # (.., n, nodes) -> (.., n, size)
    """The `size` nodes that each row attends to, in order."""
    column = torch.arange(visible.shape[-1], device=visible.device)
    return torch.where(visible, column, visible.shape[-1]).sort(-1).values[..., :size]


def _path_layout(seen: Tensor, depth: int, size: int) -> Layout:
    """Paths of `size` slots that attend to themselves, and to what their roots have `seen`."""
    rows, count, _ = seen.shape
    own = torch.eye(count, dtype=torch.bool, device=seen.device)
    own = own.repeat_interleave(size, 0).repeat_interleave(size, 1).expand(rows, -1, -1)
    steps = torch.arange(depth, depth + size, device=seen.device).repeat(count)
    return Layout(steps.expand(rows, -1), torch.cat((seen.repeat_interleave(size, 1), own), 2))


def _gather_rows(states: Tensor, index: Tensor, branches: int) -> Tensor:
    """States (layers, R, m, D) at `index` (1 or B, n): (layers, R * n, D)."""
    rows = states.shape[1] // branches
    index = index.expand(rows, -1).repeat(branches, 1)[None, ..., None]
    found = states.gather(2, index.expand(len(states), -1, -1, states.shape[-1]))
    return found.flatten(1, 2)


FALCON_HEAD = HeadKind(FalconHead, FalconDraft, "Falcon head")


def falcon_head(kit: Kit) -> Drafter:
    """A Falcon head, which drafts level by level. Raises ValueError for other shapes."""
    if not isinstance(kit.shape, Chain | StaticTree | DynamicTree):
        raise ValueError(
            f"a Falcon head drafts level by level, not a {type(kit.shape).__name__}; give length=, "
            "or a tree of child counts"
        )
    made: Any = feature_head(kit)
    drafter: Drafter = made
    return drafter
