"""Drafting with heads that hear the tokens drafted before them (Hydra, Hydra++)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.drafters.growth import News, Nodes
from mmspec.drafters.neural.head_kind import HeadKind
from mmspec.drafters.neural.small_model import committed, draft_distribution
from mmspec.drafters.neural.target_states import (
    OfLastStates,
    guided_logits,
    kept_states,
    read_prompt,
    side_by_side,
)
from mmspec.models.heads.hydra import HydraHeads
from mmspec.targets.memory import Memory, block
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class HydraDraft(OfLastStates):
    """Distributions of the next tokens, of one state of the target and of the tokens behind it.

    Ankner et al. 2024. The newest token was said by the target of its last state; head i speaks of
    the place i + 1 behind that one, and hears the newest token and the i drafted ones between:

        token     a    b   [x    y    z ]       committed a b, drafted x y z
        head                0    1    2         of the state of a; 0 hears b, 1 hears b x, ..

    A layer in front (Hydra++) remembers the states of all tokens so far. Where a gate kept tokens
    that the target has not read, the last state that is known stands in. Under guidance both
    branches are read.
    """

    heads: HydraHeads

    @property
    def reach(self) -> int:
        return self.heads.reach

    def begin(self, context: Context) -> _Heard:
        states = context.shared["hidden"]  # (R, L, D)
        fresh = [own[:0] for own in states[:, 0]]
        if self.heads.prefix_embeding_layer is None:
            return _Heard(states[:, -1], fresh)
        memory, read = read_prompt(self.heads.config, context, states, self.heads.prefix)
        return _Heard(read[:, -1], fresh, memory)

    def predict_first(self, context: Context, state: _Heard) -> Categorical:
        self._read(state)
        newest = torch.tensor([row[-1:] for row in context.history], device=context.device)
        state.paths = [self._embed(state, newest)[:, :, None]]
        logits = self.heads(state.last[:, None], state.paths[0])
        return draft_distribution(context, guided_logits(context, logits), committed(context))

    def predict(self, context: Context, state: _Heard, nodes: Nodes) -> Categorical:
        layout = nodes.layout
        embeds = self._embed(state, nodes.tokens)
        depths = layout.depths.expand(len(nodes.tokens), -1)
        parents = layout.parents.expand(len(nodes.tokens), -1)
        branches = len(embeds) // len(nodes.tokens)
        deepest = int(depths.max()) + 2  # tokens that the deepest node hears
        width = max(deepest, state.paths[-1].shape[2])
        known = torch.cat([_widened(path, width) for path in state.paths], 1)
        parents, depths = parents.repeat(branches, 1), depths.repeat(branches, 1)
        rows = torch.arange(len(embeds), device=embeds.device)[:, None]
        paths = known[rows, parents]
        places = torch.arange(embeds.shape[1], device=embeds.device)
        paths[rows, places, depths + 1] = embeds
        state.paths.append(paths)
        logits = self._by_depth(state.last, paths, depths)
        return draft_distribution(
            context, guided_logits(context, logits), nodes.prefix(context), layout.depths + 1
        )

    def keep(self, context: Context, state: _Heard, news: News) -> _Heard:
        """Take the true states of what was kept."""
        new = kept_states(context, news, "hidden")
        state.fresh = [torch.cat(pair) for pair in zip(state.fresh, new, strict=True)]
        return state

    def _embed(self, state: _Heard, tokens: Tensor) -> Tensor:  # (B, n) -> (R, n, D)
        branches = len(state.last) // len(tokens)
        return self.backbone.embed(tokens).repeat(branches, 1, 1)

    def _by_depth(self, last: Tensor, paths: Tensor, depths: Tensor) -> Tensor:  # (R, n, V)
        """What the head of each node's depth says."""
        said: Tensor | None = None
        for depth in sorted(set(depths.flatten().tolist())):
            heard = paths[:, :, : depth + 2]
            state = last[:, None].expand(-1, paths.shape[1], -1)
            own = self.heads(state, heard)
            said = own if said is None else torch.where((depths == depth)[..., None], own, said)
        assert said is not None
        return said

    def _read(self, state: _Heard) -> None:
        """Let the layer in front read the states that are new."""
        counts = [len(fresh) for fresh in state.fresh]
        if not any(counts):
            return
        states = side_by_side(state.fresh)
        if state.memory is None:
            read = states
        else:
            layout = block([[0] * max(count, 1) for count in counts], None, state.memory.like)
            positions, mask, _ = state.memory.place(layout)
            read = self.heads.prefix(states, mask, positions, state.memory.cache)
            state.memory.advance(counts)
        is_new = torch.tensor(counts, device=states.device)[:, None] > 0
        state.last = torch.where(is_new, read[:, -1], state.last)
        state.fresh = [own[:0] for own in state.fresh]


@dataclass
class _Heard:
    """What heads speak of; R rows are B, or 2B with both branches of guidance."""

    last: Tensor  # (R, D) of the last token that was read
    fresh: list[Tensor]  # (n, D) per row: true states that the layer in front has not read
    memory: Memory | None = None  # of the layer in front
    paths: list[Tensor] = field(default_factory=list)  # (R, n, k, D) each: what nodes hear


def _widened(paths: Tensor, width: int) -> Tensor:  # (R, n, k, D) -> (R, n, width, D)
    missing = width - paths.shape[2]
    return torch.cat((paths, paths.new_zeros(*paths.shape[:2], missing, paths.shape[3])), 2)


HYDRA_HEADS = HeadKind(HydraHeads, HydraDraft, "set of Hydra heads")
