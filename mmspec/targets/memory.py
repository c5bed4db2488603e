"""The state of one request in a Hugging Face model: cache, mask, two position counters.

KV slots and rotary positions are different numbers (an image of 1 000 slots may span 32 rotary
positions): `lengths` counts slots, `rope` gives `position_ids`; neither gives the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.draft import Draft
from mmspec.targets.cache import SlotCache
from mmspec.targets.slots import Mask
from mmspec.trees import Tree

if TYPE_CHECKING:
    from mmspec.targets.readers.rotary import PositionTable


@dataclass(frozen=True, eq=False)
class BlockSeries:
    """Blocks of draft nodes that are read one after the other, placed with the first of them.

    `counts` are their nodes, n in all.
    """

    depths: Tensor  # (1, n) rotary offset from the first uncommitted slot
    corner: Tensor  # (1, n, n) bool
    counts: tuple[int, ...]


@dataclass(frozen=True)
class TokenBlock:
    """Tokens of one forward: P waiting (pending) tokens per row, then N draft nodes; q = P + N.

    A drafter reads its tree level by level: `num_preceding` tokens of earlier blocks, not committed
    yet, then precede this one. Rows with fewer pending tokens are padded on the left; padding is
    written after the real slots.
    """

    tokens: Tensor  # (B, q) int64
    depths: Tensor  # (1 or B, q) rotary offset from the first uncommitted slot
    corner: Tensor  # (1 or B, q, num_preceding + q) bool: uncommitted slots each one attends to
    waiting: int  # P
    pads: tuple[int, ...] | None = None  # left padding per row, None = none anywhere
    num_preceding: int = 0
    embeds: Tensor | None = None  # (B, N, D) input embeddings in place of the draft tokens
    is_chain: bool = True  # False = nodes have siblings
    series: BlockSeries | None = None  # which this block, of draft nodes alone, is a part of
    part: int = 0

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def embed_tokens(self, embed: Callable[[Tensor], Tensor]) -> Tensor:  # (B, q, D)
        """Input embeddings of a decoder whose table is `embed`: (B, n) -> (B, n, D)."""
        if self.embeds is None:
            return embed(self.tokens)
        before = embed(self.tokens[:, : self.length - self.embeds.shape[1]])
        return torch.cat((before, self.embeds.to(before)), 1)

    def row(self, index: int) -> TokenBlock:
        """One row of a chain, without padding."""
        pad = self.pads[index] if self.pads is not None else 0
        each = min(index, self.depths.shape[0] - 1)
        corner = self.corner[:1] if self.corner.shape[0] == 1 else self.corner[index : index + 1]
        return TokenBlock(
            self.tokens[index : index + 1, pad:],
            self.depths[each : each + 1, pad:],
            corner[:, pad:, pad:],
            max(self.waiting - pad, 0),
            None,
            self.num_preceding,
            None if self.embeds is None else self.embeds[index : index + 1],
            self.is_chain,
        )

    def repeat_batch(self, times: int) -> TokenBlock:
        """The block repeated for `times` batches."""
        if times == 1:
            return self

        def repeat(one: Tensor) -> Tensor:
            return one if len(one) == 1 else one.repeat(times, *[1] * (one.dim() - 1))

        pads = None if self.pads is None else self.pads * times
        embeds = None if self.embeds is None else self.embeds.repeat(times, 1, 1)
        return TokenBlock(
            self.tokens.repeat(times, 1),
            repeat(self.depths),
            repeat(self.corner),
            self.waiting,
            pads,
            self.num_preceding,
            embeds,
            self.is_chain,
        )


def build_block(pending: Sequence[Sequence[int]], draft: Draft | None, like: Tensor) -> TokenBlock:
    """Lay out pending tokens and a draft below the last of them, on the device of `like`."""
    device = like.device
    waiting = max(len(row) for row in pending)
    short = any(len(row) < waiting for row in pending)
    rows = [[0] * (waiting - len(row)) + list(row) for row in pending] if short else pending
    tokens = torch.tensor(rows, device=device)
    if draft is not None and draft.nodes:
        tokens = torch.cat((tokens, draft.tokens), 1)
    tree = Tree.chain(0) if draft is None else draft.tree
    if tree is not None:
        depths, corner = _static(tree, waiting, device)
    else:
        assert draft is not None
        depths, corner = _dynamic(draft, waiting)
    node_inputs = None if draft is None else draft.node_inputs
    if node_inputs is not None and node_inputs.relative_positions is not None:
        before = torch.arange(waiting, device=device).expand(len(tokens), -1)
        depths = torch.cat((before, waiting + node_inputs.relative_positions), 1)
    is_chain = draft is None or draft.is_chain
    embeds = None if node_inputs is None else node_inputs.embeds
    if not short:
        return TokenBlock(tokens, depths, corner, waiting, embeds=embeds, is_chain=is_chain)
    pads = tuple(waiting - len(row) for row in pending)
    depths = depths - torch.tensor(pads, device=device)[:, None]
    return TokenBlock(tokens, depths, corner, waiting, pads, embeds=embeds, is_chain=is_chain)


class Memory:
    """Cache, mask buffer and counters of one request, the only mutable object of it."""

    def __init__(
        self,
        cache: SlotCache,
        slots: int,
        padding: Sequence[int],
        rope: Sequence[int],
        like: Tensor,
        window: int | None = None,
        is_maskless: bool = False,
    ) -> None:
        self.cache = cache
        self.lengths = [slots] * len(padding)  # slots in use per row, padding included
        self.rope = list(rope)  # rotary position of the next token per row
        self.padding = tuple(padding)  # masked slots per row
        self.window = window
        self.is_maskless = is_maskless and not any(padding)  # a single token needs no mask
        self.mask = Mask(padding, slots, like)
        self.saved_state = cache.snapshot() if cache.stateful else None  # states at `lengths`
        self.offsets: Tensor | None = None  # (axes, B, 1) offset of each rotary axis to `rope`
        self.table: PositionTable | None = None  # positions that do not count on from `rope`
        self.axes = 1  # rows of `position_ids`: several for M-RoPE, 0 = computed by the model
        self.step_inputs: Mapping[str, Any] = {}  # further arguments of every step, see `carried`
        self.is_stepwise = False  # the model makes positions and masks: chains of one row only
        self.max_position: int | None = None  # the last position id, see `place`
        self.fixed: Any = None  # `FixedSlots`, where blocks are read by compiled graphs
        self.placed: Any = None  # the series that is being read, where it is, and its positions
        self.model_cache: Any = cache  # the one passed to the model; encoder-decoders wrap slots
        self.source: Any = None  # encoder outputs of an encoder-decoder
        self.forked: Any = None  # `ForkedRead` of a tree that recurrent layers have read

    @property
    def like(self) -> Tensor:
        """A tensor of the mask's dtype and device."""
        return self.mask.buffer

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def place(self, block: TokenBlock) -> tuple[Tensor, Tensor | None, Tensor]:
        """Plan the slots of a block after the committed ones.

        Returns position_ids (1 or B, q), the additive mask (1 or B, 1, q, view) or None where one
        token attends to everything, and the slots of the queries (1 or B, q) for window masks.
        """
        first, positions = self.lengths[0], None
        if block.pads is None and all(slot == first for slot in self.lengths):
            self.cache.plan_uniform(first + block.num_preceding, block.length)
            mask, positions = self._place_part(block, first)
        else:
            view = max(self.lengths) + block.num_preceding + block.length
            self.cache.plan_rows(self._slots(block), view)
            mask, self.placed = self.mask.place_ragged(self.lengths, block, view), None
        if positions is None:
            positions = block.depths + to_column(self.rope, block.depths.device)
        if block.pads is not None:
            positions = positions.clamp_min(0)
        if self.max_position is not None:  # a finished row is still read while others continue
            positions = positions.clamp_max(self.max_position)
        queries = block.depths
        if self.window is not None:
            queries = queries + to_column(self.lengths, block.depths.device)
            self.cache.plan.low = max(min(self.lengths) - self.window + 1, 0)
        return positions, mask, queries

    def _place_part(self, block: TokenBlock, at: int) -> tuple[Tensor | None, Any]:
        """Mask and positions of a block; with the first of a series, those of all its blocks."""
        series, count, before = block.series, block.length, block.num_preceding
        is_alone = self.is_maskless and count == 1 and not before
        if series is not None and not block.part:
            mask = self.mask.place_uniform(at, series.corner, count)
            positions = series.depths + to_column(self.rope, series.depths.device)
            self.placed = series, (at, *self.rope), positions.split(series.counts, 1)
            return None if is_alone else mask, self.placed[2][0]
        if self.placed is not None and self.placed[:2] == (series, (at, *self.rope)):
            mask = self.mask.view(count, 0, at + before + count, before)
            return mask, self.placed[2][block.part]
        self.placed = None
        return None if is_alone else self.mask.place_uniform(at, block.corner), None

    def place_step(self, block: TokenBlock) -> tuple[Tensor, Tensor]:
        """Plan the slots of a chain of one row, as `generate()` places it.

        For classes that take no positions, or use a mask in another way than a drafted block needs:
        the model's own step of several tokens makes positions and mask. Row by row, since rows with
        different numbers of tokens would need different masks.
        Returns position_ids (1, q) and the padding mask (1, view).
        """
        start = self.lengths[0] + block.num_preceding
        self.cache.plan_uniform(start, block.length)
        positions = block.depths + self.rope[0]
        if self.max_position is not None:
            positions = positions.clamp_max(self.max_position)
        seen = torch.ones(1, start + block.length, dtype=torch.int64, device=self.like.device)
        seen[:, : self.padding[0]] = 0
        return positions, seen

    def spread_axes(self, positions: Tensor) -> Tensor:  # (1 or B, q) -> (axes, B, q)
        """Positions on every rotary axis (M-RoPE); after an image these differ."""
        if self.table is not None:
            return self.table.look_up(positions)
        spread = positions.expand(self.axes, self.batch, -1)
        return spread if self.offsets is None else spread + self.offsets

    def _slots(self, block: TokenBlock) -> Tensor:  # (B, q)
        columns = torch.arange(block.length, device=block.tokens.device)
        base = torch.tensor(self.lengths, device=columns.device)[:, None] + block.num_preceding
        if block.pads is None:
            return base + columns
        pads = torch.tensor(block.pads, device=columns.device)[:, None]
        return base + (columns - pads) % block.length  # padding wraps around to the end

    def advance(self, steps: Sequence[int]) -> None:
        """Commit the first `steps[b]` slots of the last block in row b; all, if recurrent."""
        for row, step in enumerate(steps):
            self.lengths[row] += step
            self.rope[row] += step
        if self.saved_state is not None and any(steps):
            self.saved_state = self.cache.snapshot()
        elif self.saved_state is not None:  # nothing is committed
            self.cache.restore(self.saved_state)

    def commit(
        self, waiting: Sequence[int], paths: Sequence[Sequence[int]], nodes: int
    ) -> list[int]:
        """Commit the pending tokens and the accepted nodes of the last block, contiguously.

        Returns the committed slots per row. A recurrent model commits a chain as a whole or not at
        all: its state is restored where a node was rejected, and the accepted tokens stay pending
        (lazy replay). After a tree its state is advanced along the path (`ForkedRead`).
        """
        if self.forked is not None:
            self.forked.replay(waiting[0] + (paths[0][-1] if paths[0] else -1))
        elif self.saved_state is not None and len(paths[0]) < nodes:
            self.cache.restore(self.saved_state)
            return [0]
        if any(node != step for path in paths for step, node in enumerate(path)):
            self.cache.move(*self._moves(waiting, paths))
        kept = [wait + len(path) for wait, path in zip(waiting, paths, strict=True)]
        self.advance(kept)
        self.forked = None
        return kept

    def _moves(
        self, waiting: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Source and target slots, (B, n) or (n,) of one row, that make paths contiguous."""
        width = max(len(path) for path in paths)
        source, target = [], []
        for kept, wait, path in zip(self.lengths, waiting, paths, strict=True):
            base = kept + wait
            spare = [base - 1] * (width - len(path))  # self-moves, of a slot that is not written
            source.append([base + node for node in path] + spare)
            target.append([base + step for step in range(len(path))] + spare)
        pair = (source[0], target[0]) if len(source) == 1 else (source, target)
        moved, to = torch.tensor(pair, device=self.mask.device).unbind(0)
        return moved, to

    def mask_window(self, mask: Tensor, queries: Tensor) -> Tensor:
        """The mask of sliding-window layers over the slots they read."""
        assert self.window is not None
        low = self.cache.plan.low
        slots = torch.arange(low, mask.shape[-1], device=mask.device)
        hidden = slots <= (queries - self.window)[:, None, :, None]
        return mask[..., low:].masked_fill(hidden, self.mask.hide)


class RowMemories:
    """One memory per row, as recurrent states cannot advance by different steps per row."""

    def __init__(self, rows: Sequence[Memory]) -> None:
        self.rows = list(rows)
        self.num_useful: Sequence[int] | None = None  # nodes that each row can keep

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        return [row.lengths[0] for row in self.rows]

    @property
    def padding(self) -> tuple[int, ...]:
        return tuple(row.padding[0] for row in self.rows)

    @property
    def like(self) -> Tensor:
        return self.rows[0].like

    @property
    def saved_state(self) -> Any:
        return self.rows[0].saved_state

    def advance(self, steps: Sequence[int]) -> None:
        for row, step in zip(self.rows, steps, strict=True):
            row.advance([step])

    def commit(
        self, waiting: Sequence[int], paths: Sequence[Sequence[int]], nodes: int
    ) -> list[int]:
        triples = zip(self.rows, waiting, paths, strict=True)
        return [row.commit([wait], [path], nodes)[0] for row, wait, path in triples]


def to_column(values: Sequence[int], device: torch.device) -> Any:
    """Per-row numbers as a column (B, 1), or one number where all rows agree."""
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor(values, device=device)[:, None]


@lru_cache(maxsize=256)
def _static(tree: Tree, waiting: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depths (1, q) and corner (1, q, q) of `waiting` tokens followed by a tree."""
    depths = [*range(waiting), *(waiting + depth for depth in tree.depths)]
    corner = _open_corner(tree.ancestors_on(torch.device("cpu")), waiting)
    return torch.tensor(depths, device=device)[None], corner.to(device)


def _dynamic(draft: Draft, waiting: int) -> tuple[Tensor, Tensor]:
    """The same for trees that differ between rows: (B, q), (B, q, q)."""
    if waiting == 1:
        visible = functional.pad(draft.reach, (1, 0), value=1.0)
        return draft.scored_depths, visible.bool()
    chain, corner = _chain_before(draft.batch, draft.nodes, waiting, draft.tokens.device)
    visible = corner.clone()
    visible[:, waiting:, waiting:] = draft.ancestors()
    return torch.cat((chain, draft.depths() + waiting), 1), visible


@lru_cache(maxsize=256)
def _chain_before(
    batch: int, nodes: int, waiting: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Depths (B, waiting), and the corner (B, q, q) of nodes that do not attend to each other."""
    hidden = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=device)
    return torch.arange(waiting, device=device).expand(batch, -1), _open_corner(hidden, waiting)


def _open_corner(ancestors: Tensor, waiting: int) -> Tensor:  # (B, N, N) -> (B, q, q) bool
    batch, nodes, _ = ancestors.shape
    corner = ancestors.new_zeros(batch, waiting + nodes, waiting + nodes)
    corner[:, :, :waiting] = True
    corner[:, :waiting, :waiting] = torch.ones(waiting, waiting, dtype=torch.bool).tril()
    corner[:, waiting:, waiting:] = ancestors
    return corner
