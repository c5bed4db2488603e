"""Drafting with a DFlash head: a block of masked tokens over the target's states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
    predict_ahead,
)
from mmspec.drafters.neural.feature_head import (
    MAX_KNOWN_STATES,
    check_head,
    tap_of,
)
from mmspec.drafters.neural.head_prompt import (
    TargetPrompt,
    pack_slots,
    read_target_prompt,
    repeat_last_states,
    require_tokens,
)
from mmspec.drafters.neural.target_heads import HeadKind, accepted_states, guided_logits
from mmspec.models.heads.dflash import DFlashHead, make_compiled_step
from mmspec.recipe import STATES
from mmspec.targets.cache import SlotCache
from mmspec.targets.fixed import round_length
from mmspec.targets.memory import Memory, TokenBlock, build_block
from mmspec.targets.readers.backbone import MAX_RESERVED_SLOTS
from mmspec.targets.readers.reader import Reader
from mmspec.targets.rows import CannotJoin, drop_row, join_slotted, swap_out
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class DFlashDraft(DraftModel):
    """Distributions of the next tokens from one pass over a block of masks (Chen et al. 2026).

    Every token that the target has read has a slot of keys and values, projected once from the
    target's states. The block follows them and is overwritten in the next round:

        slot      a    b    c  [d    ?    ?    ?]      committed a b c d, d not read by the target
        drafts                       e    f    g

    Tokens accepted by a gate without a forward have no states: the last known ones stand in for
    them. Under guidance both branches are read. Raises ValueError at construction for a head of
    another target.
    """

    backbone: Reader  # the target's
    head: DFlashHead
    tap: str = field(init=False, repr=False)  # name of the head's features in the target
    graphs: Any = field(init=False, repr=False, default=None)  # compiled; see `compile_blocks`
    sees: ClassVar[str] = STATES
    is_parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_head(self.head, self.backbone)
        object.__setattr__(self, "tap", tap_of(self.head, self.backbone))

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    @property
    def required_features(self) -> frozenset[str]:
        return frozenset({self.tap})

    @property
    def max_depth_ahead(self) -> int:
        return self.head.reach

    def begin(self, context: Context) -> _BlockState:
        prompt = read_target_prompt(context, self.tap, frozenset())
        read = context_slots(self.head, self.backbone, prompt)
        count = read.states.shape[1]
        room = count + min(context.request.max_new_tokens + 64, MAX_RESERVED_SLOTS)
        cache = SlotCache(self.head.config, room + self.head.config.block_size)
        cache.plan_uniform(0, count)
        self.head.cache_context(read.states, read.positions, cache)
        memory = Memory(cache, count, read.pads, read.rope, read.states[:0])
        memory.offsets, memory.axes = read.offsets, 3 if read.positions.dim() == 3 else 1
        if self.graphs is not None:
            self.graphs.prepare(memory, context.request.max_new_tokens + self.head.reach)
        known = list(read.states[:, -1:])
        return _BlockState(memory, [one[:0] for one in known], known, list(context.prompt))

    def predict_first(self, context: Context, state: _BlockState) -> Categorical:
        logits = guided_logits(context, self._read_ahead(context, state))
        state.logits = self.head.expand_logits(logits)
        return draft_distribution(context, state.logits[:, :1], committed_prefix(context))

    def predict(self, context: Context, state: _BlockState, nodes: DraftNodes) -> Categorical:
        assert state.logits is not None
        return predict_ahead(context, state.logits, nodes)

    def keep(self, context: Context, state: _BlockState, update: DraftUpdate) -> _BlockState:
        """Append the target's states of the tokens that it has read."""
        for row, features in enumerate(accepted_states(context, update, self.tap)):
            states = self.head.fuse(features)
            state.fresh[row] = torch.cat((state.fresh[row], states))
            state.known[row] = torch.cat((state.known[row], states))[-MAX_KNOWN_STATES:]
        return state

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        target = self.backbone
        make = partial(make_compiled_step, self.head, target.embed, target.head)
        modules = (self.head, target.model.get_input_embeddings(), target.head)
        object.__setattr__(self, "graphs", make_graphs(make, lambda: modules))
        return ""

    def _read_ahead(self, context: Context, state: _BlockState) -> Tensor:  # (R, K, V')
        """Cache the slots of all committed tokens but the newest, and read the masks after it."""
        pairs = zip(context.history, state.read, strict=True)
        counts = [len(row) - 1 - done for row, done in pairs]
        branches, length = len(state.fresh) // context.batch, self.head.config.block_size
        width = round_length(max(*counts, 1) + length) - length
        states = state.fresh[0].new_zeros(len(state.fresh), width, self.width)
        for row, fresh in enumerate(state.fresh):
            unseen = repeat_last_states(state.known[row], counts[row % context.batch] - len(fresh))
            states[row, width - len(unseen) - len(fresh) :] = torch.cat((unseen, fresh))

        def run_eager() -> Tensor:
            return self._read_eager(context, state, states, counts * branches)

        found = None
        if self.graphs is not None and state.memory.fixed is not None:
            newest = [[0] * width + row[-1:] for row in context.history]
            pads = [width - count for count in counts]
            block = self._masked_block(newest, state.memory.like, pads).repeat_batch(branches)
            found = self.graphs.run(state.memory, block, (states,), run_eager)
        logits = run_eager() if found is None else found[0]
        state.memory.advance(counts * branches)
        state.read = [len(row) - 1 for row in context.history]
        state.fresh = [fresh[:0] for fresh in state.fresh]
        return logits

    def _read_eager(
        self, context: Context, state: _BlockState, states: Tensor, counts: Sequence[int]
    ) -> Tensor:  # (R, K, V')
        memory, most = state.memory, max(counts)
        if most:
            slots = build_block([[0] * count for count in counts], None, memory.like)
            positions, _, _ = memory.place(slots)
            places = self._axes(state, positions)
            self.head.cache_context(states[:, -most:], places, memory.cache)
        memory.advance(counts)
        newest = [row[-1:] for row in context.history]
        block = self._masked_block(newest, memory.like).repeat_batch(len(counts) // context.batch)
        positions, mask, _ = memory.place(block)
        out = self.head(
            self.backbone.embed(block.tokens),
            mask,
            self._axes(state, positions),
            past_key_values=memory.cache,
        )
        memory.advance([-count for count in counts])  # until the whole round is read
        return self.head.logits(out[:, 1:], self.backbone.head)

    def _masked_block(
        self, rows: Sequence[Sequence[int]], like: Tensor, pads: Sequence[int] | None = None
    ) -> TokenBlock:
        """Tokens and masks after them, which all attend to each other; `pads` are none."""
        shape, mask_id = (len(rows), self.max_depth_ahead), self.head.config.mask_token_id
        masks = Draft.chain(torch.full(shape, mask_id, device=like.device), Kind.DET)
        block = build_block(rows, masks, like)
        block = replace(block, corner=torch.ones_like(block.corner))
        if pads is None:
            return block
        depths = block.depths - torch.tensor(pads, device=like.device)[:, None]
        return replace(block, depths=depths, pads=tuple(pads))

    def _axes(self, state: _BlockState, positions: Tensor) -> Tensor:
        return state.memory.spread_axes(positions) if state.memory.axes > 1 else positions

    @property
    def width(self) -> int:
        return self.head.config.hidden_size


@dataclass
class _BlockState:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    memory: Memory
    fresh: list[Tensor]  # (n, D) per row: target states that are not in the context yet
    known: list[Tensor]  # (n, D) per row: the last target states
    read: list[int]  # (B,) tokens whose slots are in the context
    logits: Tensor | None = None  # (B, K, V) of this round

    def join(self, other: _BlockState) -> None:
        """Append the rows of another request."""
        if len(self.fresh) != len(self.read) or len(other.fresh) != len(other.read):
            raise CannotJoin("guidance doubles the rows of this head")
        self.memory = join_slotted(self.memory, other.memory)
        self.fresh += other.fresh
        self.known += other.known
        self.read += other.read
        self.logits = None

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        drop_row(self.memory, row)
        for rows in (self.fresh, self.known):
            swap_out(rows, row)
        swap_out(self.read, row)
        self.logits = None


@dataclass(frozen=True)
class ContextSlots:
    """The slots (R, n) of a prompt's tokens, padded on the left, and the position of the next."""

    states: Tensor  # (R, n, D)
    pads: list[int]
    positions: Tensor  # (R, n), or (3, R, n) with M-RoPE
    rope: list[int]  # rotary position of the next token, per row
    offsets: Tensor | None  # (3, R, 1) offset of each axis


def context_slots(head: DFlashHead, target: Reader, prompt: TargetPrompt) -> ContextSlots:
    """The context of a prompt: one slot per token, without images where the head hides them.

    Raises ValueError where images must be hidden in a prompt whose tokens are unknown.
    """
    count, device = prompt.embeds.shape[1], prompt.embeds.device
    place = torch.arange(count, device=device)
    start = torch.tensor(list(prompt.padding), device=device)[:, None]
    is_kept = place >= start
    if head.config.visual_slots == "hidden" and target.placeholder_ids:
        tokens = require_tokens(prompt.tokens)
        is_kept = is_kept & ~torch.isin(tokens, tokens.new_tensor(target.placeholder_ids))
    where, pads = pack_slots(is_kept)
    rows = torch.arange(len(where), device=device)[:, None]
    states = head.fuse(prompt.features[rows, where])
    if head.config.positions != "mrope":
        rope = [count - pad for pad in prompt.padding]
        return ContextSlots(states, pads, (where - start).clamp_min(0), rope, None)
    assert prompt.positions is not None  # a target with M-RoPE provides positions
    axes = prompt.positions[-3:].expand(3, len(where), -1)
    offsets = axes[:, :, -1:] - axes[:1, :, -1:]
    rope = [int(last) + 1 for last in axes[0, :, -1].tolist()]
    positions = axes.gather(2, where.expand(3, -1, -1))
    return ContextSlots(states, pads, positions, rope, offsets if bool(offsets.any()) else None)


def _mask_token(target: Reader) -> dict[str, Any]:
    return {"mask_token_id": target.vocabulary - 1}


DFLASH_HEAD = HeadKind(DFlashHead, DFlashDraft, "DFlash head", sizes=_mask_token)
