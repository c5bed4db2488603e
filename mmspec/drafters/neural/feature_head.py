"""Drafting with a feature head, which continues the target's own hidden states (EAGLE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.growth import DraftModel, News, Nodes, Shape
from mmspec.drafters.neural.head_kind import HeadKind
from mmspec.drafters.neural.head_prompt import ReadPrompt, head_prompt
from mmspec.drafters.neural.hydra import HYDRA_HEADS
from mmspec.drafters.neural.multi_token import MEDUSA_HEADS, MULTI_TOKEN_HEADS, SEES
from mmspec.drafters.neural.small_model import (
    SMALL_MODEL,
    committed,
    draft_distribution,
    head_of_target,
    small_model,
    waiting_block,
)
from mmspec.drafters.neural.target_states import (
    check_axes,
    check_heads,
    guided_logits,
    kept_states,
    prompt_padding,
)
from mmspec.models.heads.eagle3 import Eagle3Head
from mmspec.models.heads.feature_head import FeatureHead
from mmspec.models.heads.state_head import SlotMarks, StateHead, StateHeadConfig
from mmspec.recipe import Deferred, DraftModelKind, Kit, Recipe
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import ROOM
from mmspec.targets.readers.hooks import LayerStatesHook, layer_states
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context

KNOWN = 64  # how many of the last true states are at hand for tokens that were never seen


@dataclass(frozen=True, eq=False)
class FeatureDraft(DraftModel):
    """A draft model on top of the target's states (Li et al. 2024 and 2025, EAGLE-1 to 3).

    Slot t of its memory holds the state of token t and the embedding of token t + 1, and leads to
    the distribution of token t + 2. States of committed tokens are the target's; deeper in a draft
    they are the head's own, and are read again as soon as the target has given the true ones:

        token      a    b    c   [x    y ]     committed a b c, drafted x y
        slot      a|b  b|c  c|x' x'|y          ' = what the head said of the state

    Tokens that a gate kept unseen have no state of the target's: the last states that are known
    stand in for theirs (VVS, Dong et al. 2026).

    What becomes of slots that would read a picture, and where slots stand, is the head's to say
    (`mmspec.models.heads.state_head`), unless `visual_slots` is given.

    Under guidance both branches are read, each with the target's states of its own, and the logits
    are guided by the target's scale. Raises ValueError at construction for a head of another
    target, and for a target without states to offer.
    """

    backbone: Reader  # the target's
    head: StateHead
    visual_slots: str | None = None
    tap: str = field(init=False, repr=False)  # what the target calls the head's features
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
    def wants(self) -> frozenset[str]:
        return frozenset({self.tap}) | attention_of(self.head, self.backbone)

    def begin(self, context: Context) -> _Thread:
        told = _told(context, self.tap, attention_of(self.head, self.backbone))
        read = head_prompt(self.head, self.backbone, told, self.visual_slots)
        count = read.embeds.shape[1]
        cache = SlotCache(self.head.config, count + 1 + min(context.request.room + 64, ROOM))
        if count:
            cache.plan_uniform(0, count)
            self.head(
                read.embeds,
                read.states,
                read.seen if any(read.pads) else None,
                read.positions,
                past_key_values=cache,
                marks=read.marks,
            )
        memory = Memory(cache, count, read.pads, read.rope, read.states[:0])
        memory.offsets, memory.axes = read.offsets, 3 if read.positions.dim() == 3 else 1
        last = list(self.head.fused(told.features[:, -1:]))
        return _Thread(memory, last, [*last], list(context.prompt), read.global_vector)

    def predict_first(self, context: Context, state: _Thread) -> Categorical:
        branches = len(state.fresh) // context.batch
        layout, counts = waiting_block(context, state.read, state.memory.like)
        states = state.fresh[0].new_zeros(len(state.fresh), layout.length, self.width)
        for row, fresh in enumerate(state.fresh):
            unseen = borrowed(state.known[row], counts[row % context.batch] - len(fresh))
            states[row, layout.length - len(unseen) - len(fresh) :] = torch.cat((unseen, fresh))
        out = self._read(state, layout.tiled(branches), states)
        state.memory.advance(counts * branches)
        state.read = [len(row) for row in context.history]
        state.fresh = [fresh[:0] for fresh in state.fresh]
        state.said = [out[:, -1:]]
        return draft_distribution(context, self._logits(context, state.said[0]), committed(context))

    def predict(self, context: Context, state: _Thread, nodes: Nodes) -> Categorical:
        branches = len(state.fresh) // context.batch
        parent = nodes.layout.parents.expand(context.batch, -1)
        parent = parent if branches == 1 else parent.repeat(branches, 1)
        states = torch.cat(state.said, 1).gather(1, parent[..., None].expand(-1, -1, self.width))
        layout = nodes.block(state.memory.like).tiled(branches)
        depths = nodes.layout.depths + 1
        steps = depths if len(depths) == 1 else depths.repeat(branches, 1)
        state.said.append(self._read(state, layout, states, steps))
        logits = self._logits(context, state.said[-1])
        return draft_distribution(context, logits, nodes.prefix(context), depths)

    def keep(self, context: Context, state: _Thread, news: News) -> _Thread:
        """Take the true states of what was kept; nothing read of the draft is."""
        for row, features in enumerate(kept_states(context, news, self.tap)):
            states = self.head.fused(features)
            state.fresh[row] = torch.cat((state.fresh[row], states))
            state.known[row] = torch.cat((state.known[row], states))[-KNOWN:]
        return state

    @property
    def width(self) -> int:
        return self.head.config.hidden_size

    def _read(
        self, state: _Thread, layout: TokenBlock, states: Tensor, steps: Tensor | int = 0
    ) -> Tensor:  # (R, q, D)
        positions, mask, _ = state.memory.place(layout)
        if state.memory.axes > 1:
            positions = state.memory.on_axes(positions)
        embeds = (self.head.embeddings or self.backbone.embed)(layout.tokens)
        marks = SlotMarks(steps, None, state.global_vector)
        cache = state.memory.cache
        out: Tensor = self.head(embeds, states, mask, positions, past_key_values=cache, marks=marks)
        return out

    def _logits(self, context: Context, states: Tensor) -> Tensor:  # (R, n, D) -> (B, n, V)
        """What the head says of states, guided where both branches are read."""
        logits = self.head.logits(states, self.backbone.head)
        return self.head.spread(guided_logits(context, logits))


@dataclass
class _Thread:
    """What the head remembers; R rows are B, or 2B with both branches of guidance."""

    memory: Memory
    fresh: list[Tensor]  # (n, D) per row: true states that no slot was made of yet
    known: list[Tensor]  # (n, D) per row: the last true states, whatever became of them
    read: list[int]  # (B,) known tokens that a slot was made of
    global_vector: Tensor | None = None  # (R, 1, D) what it is told of pictures
    said: list[Tensor] = field(default_factory=list)  # (R, n, D) each: its own, of this round


def _told(context: Context, tap: str, attention: frozenset[str]) -> ReadPrompt:
    """What the target has read just now: the prompt, or what a turn adds to the ones before."""
    features = context.shared[tap]  # (R, L, k * H)
    count = features.shape[1]
    padding = prompt_padding(context, count)
    lengths = [count - pad for pad in padding[: context.batch]]
    tokens = None
    is_known = all(length <= own for length, own in zip(lengths, context.prompt, strict=True))
    if is_known and len(features) == context.batch:
        rows = zip(context.history, context.prompt, lengths, strict=True)
        ids = [[0] * (count - new) + row[end - new : end] for row, end, new in rows]
        tokens = torch.tensor(ids, dtype=torch.int64, device=features.device)
    shared = context.shared
    seen = {name: shared[name][:, -count:] for name in attention}
    return ReadPrompt(shared["embeds"], features, padding, tokens, shared["positions"], seen)


def borrowed(known: Tensor, count: int) -> Tensor:  # (n, D) -> (count, D)
    """The last `count` states; where there are fewer, the very last one again at the end."""
    index = torch.arange(count, device=known.device) + max(len(known) - count, 0)
    return known[index.clamp_max(len(known) - 1)]


def check_head(head: StateHead, target: Reader) -> None:
    """Refuse a head that was not made for this target, or that is damaged. Raises ValueError."""
    check_heads(head, target)
    check_axes(head, target)
    head.check()
    LayerStatesHook(target, head.taps(len(target.layers)) or ())  # refuses layers that are not


def tap_of(head: StateHead, target: Reader) -> str:
    """What a target calls the features that a head reads."""
    layers = head.taps(len(target.layers))
    return "hidden" if layers is None else layer_states(layers)


def attention_of(head: StateHead, target: Reader) -> frozenset[str]:
    """Attention of the target that a head goes by; none where there are no pictures."""
    return head.attention if target.placeholder_ids else frozenset()


def feature_head(kit: Kit) -> Drafter:
    """A head on the target's own states (EAGLE)."""
    return head_of_target(kit)


def text_anchored_head(kit: Kit) -> Drafter:
    """A head that reads text alone: no slot of a visual token (Sparrow)."""
    assert isinstance(kit.drafter, FeatureDraft)
    return head_of_target(replace(kit, drafter=replace(kit.drafter, visual_slots="hidden")))


def state_head(words: str, maker: type[StateHead] = FeatureHead, **parts: Any) -> HeadKind:
    """Heads that continue a target's states, of a class and with these parts."""
    return HeadKind(maker, FeatureDraft, words, parts)


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
    """A recipe whose drafts grow out of a head on the target's states, EAGLE's unless `kinds` say.

    `parts` are further fields.
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
    """A recipe whose drafts grow out of a small model or of heads, which see what they can.

    `parts` are further fields of the recipe.
    """
    return Recipe(
        architecture=small_model,
        execution=execution,
        verifier=verifier,
        sees="auto",
        draft_model=(SMALL_MODEL, *HEADS),
        **parts,
    )
