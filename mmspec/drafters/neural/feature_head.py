"""Drafting with a feature head, which extrapolates the target's hidden states (EAGLE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Drafter, Verifier
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    FirstBlock,
    GraphSteps,
    committed_prefix,
    draft_distribution,
    waiting_block,
)
from mmspec.drafters.neural.head_prompt import (
    head_prompt,
    read_compiled_prompt,
    read_head_prompt,
    read_target_prompt,
    repeat_last_states,
)
from mmspec.drafters.neural.hydra import HYDRA_HEADS
from mmspec.drafters.neural.multi_token import MEDUSA_HEADS, MULTI_TOKEN_HEADS, SEES
from mmspec.drafters.neural.shared_tokens import ANY_VOCABULARY
from mmspec.drafters.neural.small_model import (
    build_head_drafter,
    small_model,
)
from mmspec.drafters.neural.target_heads import (
    HeadKind,
    accepted_states,
    check_axes,
    check_heads,
    guided_logits,
)
from mmspec.drafters.shapes import Shape
from mmspec.models.compatibility import check_last_layer
from mmspec.models.heads.dflash import DFlashHead
from mmspec.models.heads.eagle3 import Eagle3Head
from mmspec.models.heads.feature_head import FeatureHead
from mmspec.models.heads.state_head import (
    SlotMarks,
    StateHead,
    StateHeadConfig,
    make_compiled_step,
)
from mmspec.models.llama_layers import FULL, SLIDING, AttentionMask
from mmspec.recipe import Deferred, DraftModelKind, Kit, Recipe
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import MAX_RESERVED_SLOTS
from mmspec.targets.readers.hooks import LayerStatesHook, layer_states
from mmspec.targets.readers.reader import Reader
from mmspec.targets.rows import CannotJoin, drop_row, join_slotted, kept_rows, swap_out
from mmspec.targets.tokens.context import Context

MAX_KNOWN_STATES = 64  # last target states kept as substitutes for tokens without a state


@dataclass(frozen=True, eq=False)
class FeatureDraft(DraftModel):
    """A draft model on the target's states (Li et al. 2024 and 2025, EAGLE-1 to 3).

    Slot t of its cache holds the state of token t and the embedding of token t + 1, and predicts
    token t + 2. States of committed tokens are the target's; deeper in a draft they are the head's
    own, and are read again once the target has computed the true ones:

        token      a    b    c   [x    y ]     committed a b c, drafted x y
        slot      a|b  b|c  c|x' x'|y          ' = state predicted by the head

    Tokens accepted by a gate without a forward have no target state: the last known states are used
    for them (VVS, Dong et al. 2026).

    The head's configuration determines its image slots and slot positions
    (`mmspec.models.heads.state_head`), unless `visual_slots` is given.

    Under guidance both branches are read, each with the target's states of its own, and the logits
    are guided by the target's scale. Raises ValueError at construction for a head of another
    target, and for a target that does not provide states.
    """

    backbone: Reader  # the target's
    head: StateHead
    visual_slots: str | None = None
    tap: str = field(init=False, repr=False)  # name of the head's features in the target
    graphs: Any = field(init=False, repr=False, default=None)  # compiled; see `compile_blocks`
    sees: ClassVar[str] = SEES

    def __post_init__(self) -> None:
        check_head(self.head, self.backbone)
        object.__setattr__(self, "tap", tap_of(self.head, self.backbone))

    @property
    def cache_config(self) -> StateHeadConfig:
        return self.head.config

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    @property
    def required_features(self) -> frozenset[str]:
        return frozenset({self.tap}) | attention_of(self.head, self.backbone)

    def begin(self, context: Context) -> HeadState:
        prompt = read_target_prompt(context, self.tap, attention_of(self.head, self.backbone))
        read = head_prompt(self.head, self.backbone, prompt, self.visual_slots)
        count = read.embeds.shape[1]
        room = 1 + min(context.request.max_new_tokens + 64, MAX_RESERVED_SLOTS)
        cache = SlotCache(self.head.config, count + room)
        if count and self.graphs is None:
            read_head_prompt(self.head, read, cache)
        elif count:
            read_compiled_prompt(self.graphs, self.head, read, cache, room)
        window = self.head.config.sliding_window
        memory = Memory(cache, count, read.pads, read.rope, read.states[:0], window)
        memory.offsets, memory.axes = read.offsets, 3 if read.positions.dim() == 3 else 1
        if self.graphs is not None:
            self.graphs.prepare(memory, context.request.max_new_tokens)
        last = list(self.head.fuse(prompt.features[:, -1:]))
        return HeadState(memory, last, [*last], list(context.prompt), read.global_vector)

    def predict_first(self, context: Context, state: HeadState) -> Categorical:
        out = self.read_committed(context, state)
        state.states_per_step = [out[:, -1:]]
        return draft_distribution(
            context, self.logits(context, state.states_per_step[0]), committed_prefix(context)
        )

    def read_committed(
        self,
        context: Context,
        state: HeadState,
        draft: Draft | None = None,
        draft_states: Tensor | None = None,
    ) -> Tensor:  # (R, q, D)
        """Read the committed tokens that were not read yet, and cache them.

        A `draft` (B, N) with `draft_states` (1, N, D) is read after them, and not cached.
        """
        unread = self.unread_block(context, state, draft, draft_states)
        out = self.read_block(state, unread.block, unread.more[0])
        unread.commit()
        return out

    def first_block(self, context: Context, state: HeadState) -> FirstBlock | None:
        if len(state.fresh) > context.batch:  # both branches of guidance
            return None
        found = self.unread_block(context, state)
        return replace(found, more=self._more(state, found.more[0], 0))

    def unread_block(
        self,
        context: Context,
        state: HeadState,
        draft: Draft | None = None,
        draft_states: Tensor | None = None,
    ) -> FirstBlock:
        branches = len(state.fresh) // context.batch
        layout, counts = waiting_block(context, state.read, state.memory.like, draft)
        states = state.fresh[0].new_zeros(len(state.fresh), layout.length, self.width)
        stop = layout.length
        if draft_states is not None:
            stop -= draft_states.shape[1]
            states[:, stop:] = draft_states
        for row, fresh in enumerate(state.fresh):
            unseen = repeat_last_states(state.known[row], counts[row % context.batch] - len(fresh))
            states[row, stop - len(unseen) - len(fresh) : stop] = torch.cat((unseen, fresh))

        def commit() -> None:
            state.memory.advance(counts * branches)
            state.read = [len(row) for row in context.history]
            state.fresh = [fresh[:0] for fresh in state.fresh]

        block = layout.repeat_batch(branches)
        return FirstBlock(state.memory, block, (states,), counts * branches, commit)

    def predict(self, context: Context, state: HeadState, nodes: DraftNodes) -> Categorical:
        branches = len(state.fresh) // context.batch
        parent = nodes.layout.parents.expand(context.batch, -1)
        parent = parent if branches == 1 else parent.repeat(branches, 1)
        states = torch.cat(state.states_per_step, 1).gather(
            1, parent[..., None].expand(-1, -1, self.width)
        )
        layout = nodes.block(state.memory.like).repeat_batch(branches)
        depths = nodes.layout.depths + 1
        steps = depths if len(depths) == 1 else depths.repeat(branches, 1)
        state.states_per_step.append(self.read_block(state, layout, states, steps))
        logits = self.logits(context, state.states_per_step[-1])
        return draft_distribution(context, logits, nodes.prefix(context), depths)

    def keep(self, context: Context, state: HeadState, update: DraftUpdate) -> HeadState:
        """Append the target's states of the accepted tokens; the cached draft is dropped."""
        for row, features in enumerate(accepted_states(context, update, self.tap)):
            states = self.head.fuse(features)
            state.fresh[row] = torch.cat((state.fresh[row], states))
            state.known[row] = torch.cat((state.known[row], states))[-MAX_KNOWN_STATES:]
        return state

    @property
    def width(self) -> int:
        return self.head.config.hidden_size

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        embed = self.head.embeddings or self.backbone.embed
        make_step = partial(make_compiled_step, self.head, embed)
        modules = (self.head, self.backbone.model.get_input_embeddings(), self.backbone.head)
        object.__setattr__(self, "graphs", make_graphs(make_step, lambda: modules))
        return ""

    def graph_steps(self) -> GraphSteps | None:
        def predict(out: Sequence[Tensor]) -> Tensor:
            return self.head.expand_logits(self.head.logits(out[0], self.backbone.head))

        def feed(
            fed: Sequence[Tensor], parents: Tensor, depths: Tensor, first: Sequence[Tensor]
        ) -> list[Tensor]:
            index = parents[..., None].expand(-1, -1, self.width)
            states = torch.cat(list(fed), 1).gather(1, index)
            vectors = [one[:, :1].expand_as(states) for one in first[2:]]
            return [states, depths + 1, *vectors]

        made = self.graphs
        return None if made is None else GraphSteps(made, made.make, predict, feed)

    def read_block(
        self, state: HeadState, layout: TokenBlock, states: Tensor, steps: Tensor | int = 0
    ) -> Tensor:  # (R, q, D)
        """The head's states of a block, from the `states` (R, q, D) before its tokens."""

        def run_eager() -> Tensor:
            return self._read_eager(state, layout, states, steps)

        if self.graphs is None or state.memory.fixed is None:
            return run_eager()
        more = self._more(state, states, steps)
        found = self.graphs.run(state.memory, layout, more, run_eager)
        return run_eager() if found is None else found[0]

    def _more(self, state: HeadState, states: Tensor, steps: Tensor | int) -> list[Tensor]:
        counts = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device) + steps
        vector = state.global_vector
        return [states, counts, *(() if vector is None else (vector.expand_as(states),))]

    def _read_eager(
        self, state: HeadState, layout: TokenBlock, states: Tensor, steps: Tensor | int
    ) -> Tensor:  # (R, q, D)
        positions, mask, queries = state.memory.place(layout)
        masks: AttentionMask = mask
        if state.memory.window is not None and mask is not None:
            masks = {FULL: mask, SLIDING: state.memory.mask_window(mask, queries)}
        if state.memory.axes > 1:
            positions = state.memory.spread_axes(positions)
        embeds = (self.head.embeddings or self.backbone.embed)(layout.tokens)
        marks = SlotMarks(steps, None, state.global_vector)
        how: Any = {"past_key_values": state.memory.cache, "marks": marks}
        out: Tensor = self.head(embeds, states, masks, positions, **how)
        return out

    def logits(self, context: Context, states: Tensor) -> Tensor:  # (R, n, D) -> (B, n, V)
        """The head's logits of states, guided where both branches are read."""
        logits = self.head.logits(states, self.backbone.head)
        return self.head.expand_logits(guided_logits(context, logits))


@dataclass
class HeadState:
    """The state of a request; R rows are B, or 2B with both branches of guidance."""

    memory: Memory
    fresh: list[Tensor]  # (n, D) per row: target states not read yet
    known: list[Tensor]  # (n, D) per row: the last target states
    read: list[int]  # (B,) known tokens already read
    global_vector: Tensor | None = None  # (R, 1, D) image vector
    states_per_step: list[Tensor] = field(
        default_factory=list
    )  # (R, n, D) each: predicted in this round

    def join(self, other: HeadState) -> None:
        """Append the rows of another request."""
        if len(self.fresh) != len(self.read) or len(other.fresh) != len(other.read):
            raise CannotJoin("guidance doubles the rows of this head")
        if (self.global_vector is None) != (other.global_vector is None):
            raise CannotJoin("one of these requests has an image vector, the other has none")
        self.memory = join_slotted(self.memory, other.memory)
        if self.global_vector is not None and other.global_vector is not None:
            self.global_vector = torch.cat((self.global_vector, other.global_vector))
        self.fresh += other.fresh
        self.known += other.known
        self.read += other.read
        self.states_per_step = []

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        if self.global_vector is not None:
            self.global_vector = self.global_vector[kept_rows(len(self.read), row)]
        drop_row(self.memory, row)
        swap_out(self.fresh, row)
        swap_out(self.known, row)
        swap_out(self.read, row)
        self.states_per_step = []


def check_head(head: StateHead | DFlashHead, target: Reader) -> None:
    """Refuse a head that was not made for this target, or that is damaged. Raises ValueError."""
    check_heads(head, target)
    check_axes(head, target)
    head.check()
    LayerStatesHook(
        target, head.taps(len(target.layers)) or ()
    )  # raises ValueError for missing layers
    check_last_layer(head, target)


def tap_of(head: StateHead | DFlashHead, target: Reader) -> str:
    """Name of the target features that a head reads."""
    layers = head.taps(len(target.layers))
    return "hidden" if layers is None else layer_states(layers)


def attention_of(head: StateHead, target: Reader) -> frozenset[str]:
    """Attention of the target that a head needs; empty for targets without images."""
    return head.attention if target.placeholder_ids else frozenset()


def feature_head(kit: Kit) -> Drafter:
    """A head on the target's own states (EAGLE)."""
    return build_head_drafter(kit)


def text_anchored_head(kit: Kit) -> Drafter:
    """A head that reads text only: no slot of a visual token (Sparrow)."""
    assert isinstance(kit.drafter, FeatureDraft)
    return build_head_drafter(replace(kit, drafter=replace(kit.drafter, visual_slots="hidden")))


def state_head(description: str, maker: type[StateHead] = FeatureHead, **parts: Any) -> HeadKind:
    """The kind of heads of a class with these config values."""
    return HeadKind(maker, FeatureDraft, description, parts)


FEATURE_HEAD = state_head("feature head")
EAGLE3_HEAD = state_head("EAGLE-3 head", Eagle3Head)
HEADS = (FEATURE_HEAD, EAGLE3_HEAD, MULTI_TOKEN_HEADS, MEDUSA_HEADS, HYDRA_HEADS)


def with_head(
    execution: Shape,
    verifier: Verifier | Deferred[Verifier],
    *kinds: DraftModelKind,
    architecture: Callable[[Kit], Drafter] = feature_head,
    optimisation: str = "regression on the target's states",
    **parts: Any,
) -> Recipe:
    """A recipe with a head on the target's states, by default EAGLE's.

    `kinds` are the kinds of heads, `parts` further fields of the recipe.
    """
    return Recipe(
        architecture=architecture,
        execution=execution,
        verifier=verifier,
        optimisation=optimisation,
        sees=SEES,
        draft_model=kinds or (FEATURE_HEAD,),
        **parts,
    )


def with_draft_model(
    execution: Shape, verifier: Verifier | Deferred[Verifier], **parts: Any
) -> Recipe:
    """A recipe with a small draft model or a head.

    `parts` are further fields of the recipe.
    """
    return Recipe(
        architecture=small_model,
        execution=execution,
        verifier=verifier,
        sees="auto",
        draft_model=(ANY_VOCABULARY, *HEADS),
        **parts,
    )
