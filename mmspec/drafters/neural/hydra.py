"""Drafting with sequentially dependent heads (Hydra, Hydra++)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
    pad_left,
    read_prompt,
)
from mmspec.models.heads.hydra import HydraHeads, make_compiled_prefix
from mmspec.targets.memory import Memory, build_block
from mmspec.targets.rows import drop_row, join_slotted, kept_rows, swap_out
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class HydraDraft(LastStateModel):
    """Distributions of the next tokens, from one state of the target and the tokens after it.

    Ankner et al. 2024. The target predicted the newest token from its last state; head i predicts
    the token i + 1 positions later, conditioned on the newest token and the i drafted ones between:

        token     a    b   [x    y    z ]       committed a b, drafted x y z
        head                0    1    2         from the state of a; 0 reads b, 1 reads b x, ..

    A prefix layer (Hydra++) attends to the states of all tokens so far. Where a gate accepted
    tokens without a forward, the last known state is used. Under guidance both branches are read.
    """

    heads: HydraHeads
    graphs: Any = field(init=False, repr=False, default=None)  # compiled; see `compile_blocks`
    prefix_graphs: Any = field(init=False, repr=False, default=None)

    @property
    def max_depth_ahead(self) -> int:
        return self.heads.reach

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        def make() -> Callable[[Tensor, Tensor], tuple[Tensor]]:
            def predict_head(last: Tensor, paths: Tensor) -> tuple[Tensor]:
                return (self.heads(last[:, None].expand(-1, paths.shape[1], -1), paths),)

            return predict_head

        prefix = partial(make_compiled_prefix, self.heads)
        object.__setattr__(self, "graphs", make_graphs(make, lambda: (self.heads,)))
        object.__setattr__(self, "prefix_graphs", make_graphs(prefix, lambda: (self.heads,), 2))
        return ""

    def begin(self, context: Context) -> _HydraState:
        if self.graphs is not None:
            self.graphs.follow()
        states = context.shared["hidden"]  # (R, L, D)
        fresh = [own[:0] for own in states]
        if self.heads.prefix_embeding_layer is None:
            return _HydraState(states[:, -1], fresh)
        memory, read = read_prompt(self.heads.config, context, states, self.heads.prefix)
        if self.prefix_graphs is not None:
            self.prefix_graphs.prepare(memory, context.request.max_new_tokens)
        return _HydraState(read[:, -1], fresh, memory)

    def predict_first(self, context: Context, state: _HydraState) -> Categorical:
        self._read(state)
        newest = torch.tensor([row[-1:] for row in context.history], device=context.device)
        state.paths = [self._embed(state, newest)[:, :, None]]
        logits = self._predict_head(state.last, state.paths[0])
        return draft_distribution(
            context, guided_logits(context, logits), committed_prefix(context)
        )

    def predict(self, context: Context, state: _HydraState, nodes: DraftNodes) -> Categorical:
        layout = nodes.layout
        embeds = self._embed(state, nodes.tokens)
        depths = layout.depths.expand(len(nodes.tokens), -1)
        parents = layout.parents.expand(len(nodes.tokens), -1)
        branches = len(embeds) // len(nodes.tokens)
        max_path = int(depths.max()) + 2  # tokens that the deepest node reads
        width = max(max_path, state.paths[-1].shape[2])
        known = torch.cat([_pad_paths(path, width) for path in state.paths], 1)
        parents, depths = parents.repeat(branches, 1), depths.repeat(branches, 1)
        rows = torch.arange(len(embeds), device=embeds.device)[:, None]
        paths = known[rows, parents]
        places = torch.arange(embeds.shape[1], device=embeds.device)
        paths[rows, places, depths + 1] = embeds
        state.paths.append(paths)
        logits = self._logits_by_depth(state.last, paths, depths)
        return draft_distribution(
            context, guided_logits(context, logits), nodes.prefix(context), layout.depths + 1
        )

    def keep(self, context: Context, state: _HydraState, update: DraftUpdate) -> _HydraState:
        """Append the target's states of the accepted tokens."""
        new = accepted_states(context, update, "hidden")
        state.fresh = [torch.cat(pair) for pair in zip(state.fresh, new, strict=True)]
        return state

    def _embed(self, state: _HydraState, tokens: Tensor) -> Tensor:  # (B, n) -> (R, n, D)
        branches = len(state.last) // len(tokens)
        return self.backbone.embed(tokens).repeat(branches, 1, 1)

    def _logits_by_depth(self, last: Tensor, paths: Tensor, depths: Tensor) -> Tensor:  # (R, n, V)
        """Logits of each node from the head of its depth."""
        logits: Tensor | None = None
        for depth in sorted(set(depths.flatten().tolist())):
            own = self._predict_head(last, paths[:, :, : depth + 2].contiguous())
            logits = (
                own if logits is None else torch.where((depths == depth)[..., None], own, logits)
            )
        assert logits is not None
        return logits

    def _predict_head(self, last: Tensor, paths: Tensor) -> Tensor:  # (R, D), (R, n, k, D)
        """Logits (R, n, V) of the head that reads k tokens."""

        def run_eager() -> Tensor:
            logits: Tensor = self.heads(last[:, None].expand(-1, paths.shape[1], -1), paths)
            return logits

        found = None if self.graphs is None else self.graphs.run_whole((last, paths), run_eager)
        return run_eager() if found is None else found[0]

    def _read(self, state: _HydraState) -> None:
        """Read the new states with the prefix layer."""
        counts = [len(fresh) for fresh in state.fresh]
        if not any(counts):
            return
        states = pad_left(state.fresh)
        if state.memory is None:
            read = states
        else:
            read = self._read_prefix(state.memory, states, counts)
            state.memory.advance(counts)
        is_new = torch.tensor(counts, device=states.device)[:, None] > 0
        state.last = torch.where(is_new, read[:, -1], state.last)
        state.fresh = [own[:0] for own in state.fresh]

    def _read_prefix(
        self, memory: Memory, states: Tensor, counts: Sequence[int]
    ) -> Tensor:  # (R, q, D)
        block = build_block([[0] * max(count, 1) for count in counts], None, memory.like)

        def run_eager() -> Tensor:
            positions, mask, _ = memory.place(block)
            return self.heads.prefix(states, mask, positions, memory.cache)

        if self.prefix_graphs is None or memory.fixed is None:
            return run_eager()
        found = self.prefix_graphs.run(memory, block, (states,), run_eager)
        return run_eager() if found is None else found[0]


@dataclass
class _HydraState:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    last: Tensor  # (R, D) of the last token that was read
    fresh: list[Tensor]  # (n, D) per row: target states that the prefix layer has not read
    memory: Memory | None = None  # of the prefix layer
    paths: list[Tensor] = field(
        default_factory=list
    )  # (R, n, k, D) each: embeddings that nodes read

    def join(self, other: _HydraState) -> None:
        """Append the rows of another request."""
        if self.memory is not None and other.memory is not None:
            self.memory = join_slotted(self.memory, other.memory)
        self.last = torch.cat((self.last, other.last))
        self.fresh += other.fresh
        self.paths = []

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        if self.memory is not None:
            drop_row(self.memory, row)
        self.last = self.last[kept_rows(len(self.last), row)]
        swap_out(self.fresh, row)
        self.paths = []


def _pad_paths(paths: Tensor, width: int) -> Tensor:  # (R, n, k, D) -> (R, n, width, D)
    missing = width - paths.shape[2]
    return torch.cat((paths, paths.new_zeros(*paths.shape[:2], missing, paths.shape[3])), 2)


HYDRA_HEADS = HeadKind(HydraHeads, HydraDraft, "set of Hydra heads")
