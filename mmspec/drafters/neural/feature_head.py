"""Drafting with a feature head, which continues the target's own hidden states (EAGLE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.draft import Drafter, Verifier
from mmspec.drafters.growth import DraftModel, News, Nodes, Shape
from mmspec.drafters.neural.multi_token import MULTI_TOKEN_HEADS, SEES
from mmspec.drafters.neural.small_model import (
    SMALL_MODEL,
    committed,
    draft_law,
    head_of_target,
    small_model,
    state_logits,
    waiting_block,
)
from mmspec.laws.categorical import Categorical
from mmspec.models.heads.feature_head import FeatureHead, FeatureHeadConfig, load_head
from mmspec.models.loading import model_type
from mmspec.models.random_weights import random_model
from mmspec.recipe import Deferred, DraftModelKind, Kit, Recipe
from mmspec.targets.backbone import ROOM
from mmspec.targets.cache import SlotCache
from mmspec.targets.context import Context
from mmspec.targets.hooks import HiddenStateHook
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.reader import Reader

KNOWN = 64  # how many of the last true states are at hand for tokens that were never seen


@dataclass(frozen=True, eq=False)
class FeatureDraft(DraftModel):
    """A draft model on top of the target's states (Li et al. 2024, EAGLE-1 and EAGLE-2).

    Slot t of its memory holds the state of token t and the embedding of token t + 1, and leads to
    the law of token t + 2. States of committed tokens are the target's; deeper in a draft they are
    the head's own, and are read again as soon as the target has given the true ones:

        token      a    b    c   [x    y ]     committed a b c, drafted x y
        slot      a|b  b|c  c|x' x'|y          ' = what the head said of the state

    Tokens that a gate kept unseen have no state of the target's: the last states that are known
    stand in for theirs (VVS, Dong et al. 2026).

    Slots that would read the embedding of one of the ids in `hides` are left out of the prompt, and
    the others stay at their positions (the text-anchored window of Sparrow, 2026).

    Under guidance both branches are read, each with the target's states of its own, and the logits
    are guided by the target's scale. Raises ValueError at construction for a head of another
    target, and for a target without states to offer.
    """

    backbone: Reader  # the target's
    head: FeatureHead
    hides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_head(self.head, self.backbone)

    @property
    def sees(self) -> str:
        return SEES

    @property
    def cache_config(self) -> FeatureHeadConfig:
        return self.head.config

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    @property
    def wants(self) -> frozenset[str]:
        return frozenset({"hidden"})

    def begin(self, context: Context) -> _Thread:
        embeds, states = context.shared["embeds"], context.shared["hidden"]  # (R, L, D)
        slots = states.shape[1] - 1
        start = torch.tensor(context.memory.padding, device=states.device)[:, None]
        where, pads = _read_slots(context, start, slots, self.hides)
        count = where.shape[1]
        cache = SlotCache(self.head.config, count + 1 + min(context.request.room + 64, ROOM))
        if count:
            cache.plan_uniform(0, count)
            place = torch.arange(count, device=states.device)
            mask = place >= torch.tensor(pads, device=states.device)[:, None]
            rows = torch.arange(len(states), device=states.device)[:, None]
            self.head(
                embeds[rows, where + 1],
                states[rows, where],
                mask if any(pads) else None,
                (where - start).clamp_min(0),
                past_key_values=cache,
            )
        rope = [slots - pad for pad in context.memory.padding]
        memory = Memory(cache, count, pads, rope, states[:0])
        last = list(states[:, -1:])
        dropped = [whole - (count - pad) for whole, pad in zip(rope, pads, strict=True)]
        return _Thread(memory, last, [*last], dropped)

    def listen(self, context: Context, state: _Thread) -> Categorical:
        branches = len(state.fresh) // context.batch
        slots = zip(state.memory.kept, state.memory.padding, state.dropped, strict=True)
        read = [kept - pad + 1 + dropped for kept, pad, dropped in slots]
        layout, counts = waiting_block(context, read[: context.batch], state.memory.like)
        states = state.fresh[0].new_zeros(len(state.fresh), layout.length, self.width)
        for row, fresh in enumerate(state.fresh):
            unseen = borrowed(state.known[row], counts[row % context.batch] - len(fresh))
            states[row, layout.length - len(unseen) - len(fresh) :] = torch.cat((unseen, fresh))
        out = self._read(state, layout.tiled(branches), states)
        state.memory.advance(counts * branches)
        state.fresh = [fresh[:0] for fresh in state.fresh]
        state.said = [out[:, -1:]]
        return draft_law(
            context, state_logits(context, self.backbone, state.said[0]), committed(context)
        )

    def say(self, context: Context, state: _Thread, nodes: Nodes) -> Categorical:
        branches = len(state.fresh) // context.batch
        parent = nodes.layout.parents.expand(context.batch, -1).repeat(branches, 1)
        states = torch.cat(state.said, 1).gather(1, parent[..., None].expand(-1, -1, self.width))
        layout = nodes.block(state.memory.like).tiled(branches)
        state.said.append(self._read(state, layout, states))
        logits = state_logits(context, self.backbone, state.said[-1])
        return draft_law(context, logits, nodes.prefix(context), nodes.layout.depths + 1)

    def keep(self, context: Context, state: _Thread, news: News) -> _Thread:
        """Take the true states of what was kept; nothing read of the draft is."""
        states = news.scores.features["hidden"]
        for row, fresh in enumerate(state.fresh):
            path = news.kept.path[row % context.batch]
            places = [0, *(node + 1 for node in path)]
            new = places[: len(news.kept.tokens[row % context.batch])]
            state.fresh[row] = torch.cat((fresh, states[row, new]))
            state.known[row] = torch.cat((state.known[row], states[row, new]))[-KNOWN:]
        return state

    @property
    def width(self) -> int:
        return self.head.config.hidden_size

    def _read(self, state: _Thread, layout: TokenBlock, states: Tensor) -> Tensor:  # (R, q, D)
        positions, mask, _ = state.memory.place(layout)
        embeds = self.backbone.embed(layout.tokens)
        cache = state.memory.cache
        out: Tensor = self.head(embeds, states, mask, positions, past_key_values=cache)
        return out


@dataclass
class _Thread:
    """What the head remembers; R rows are B, or 2B with both branches of guidance."""

    memory: Memory
    fresh: list[Tensor]  # (n, D) per row: true states that no slot was made of yet
    known: list[Tensor]  # (n, D) per row: the last true states, whatever became of them
    dropped: list[int]  # slots per row that were left out of the prompt
    said: list[Tensor] = field(default_factory=list)  # (R, n, D) each: its own, of this round


def _read_slots(
    context: Context, start: Tensor, slots: int, hides: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """Slots (R, n) of the prompt that are read, and the left padding of each row.

    `start` (R, 1) are the slots before which a row is padded. Raises ValueError where slots are to
    be left out of a prompt whose tokens are not known.
    """
    every = torch.arange(slots, device=start.device)
    if not hides:
        return every.expand(len(start), -1), start[:, 0].tolist()
    if len(start) != context.batch or any(context.unknown):
        raise ValueError(
            "visual tokens can be left out of a prompt of ids alone, without guidance; use recipe "
            "'eagle', which reads them"
        )
    read = []
    for row, length, pad in zip(context.history, context.prompt, start[:, 0].tolist(), strict=True):
        text = [at for at, token in enumerate(row[1:length]) if token not in hides]
        read.append(torch.tensor(text, dtype=torch.int64, device=start.device) + pad)
    width = max(map(len, read))
    padded = [torch.cat((own.new_zeros(width - len(own)), own)) for own in read]
    return torch.stack(padded), [width - len(own) for own in read]


def borrowed(known: Tensor, count: int) -> Tensor:  # (n, D) -> (count, D)
    """The last `count` states; where there are fewer, the very last one again at the end."""
    index = torch.arange(count, device=known.device) + max(len(known) - count, 0)
    return known[index.clamp_max(len(known) - 1)]


def check_head(head: FeatureHead, target: Reader) -> None:
    """Refuse a head that was not made for this target. Raises ValueError."""
    HiddenStateHook(target)
    ours = (int(target.config.hidden_size), target.vocabulary)
    theirs = (head.config.hidden_size, head.config.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"this feature head continues states {theirs[0]} wide over {theirs[1]} tokens, but "
            f"{type(target.model).__name__} has states {ours[0]} wide over {ours[1]} tokens; train "
            "a head for this target with mmspec.training.learn_head"
        )


def feature_head(kit: Kit) -> Drafter:
    """A head on the target's own states (EAGLE)."""
    return head_of_target(kit)


def text_anchored_head(kit: Kit) -> Drafter:
    """A head that reads text alone: no slot of a visual token (Sparrow)."""
    assert isinstance(kit.drafter, FeatureDraft)
    hides = kit.target.placeholder_ids
    return head_of_target(replace(kit, drafter=replace(kit.drafter, hides=hides)))


@dataclass(frozen=True)
class FeatureHeadKind(DraftModelKind):
    """`mmspec.models.heads.feature_head.FeatureHead`s, bound to the target as a `FeatureDraft`."""

    words: str = "feature head"

    def accepts(self, model: Any) -> bool:
        return isinstance(model, FeatureHead)

    def owns(self, folder: Path) -> bool:
        there = (folder / "config.json").exists()
        return there and model_type(folder) == FeatureHeadConfig.model_type

    def load(
        self, source: str | Path, target: Reader, dtype: torch.dtype | None = None
    ) -> FeatureHead:
        return load_head(source, dtype)

    def default_sees(self, model: Any, target: Reader, asked: str) -> str:
        if asked not in ("auto", SEES):
            raise ValueError(
                f"sees={asked!r} does not fit: a feature head reads the target's states ({SEES!r}) "
                "and nothing else; drop sees=, or use another recipe"
            )
        return SEES

    def read(self, model: FeatureHead, target: Reader, sees: str) -> FeatureDraft:
        moved: FeatureHead = nn.Module.to(model, target.device, target.model.dtype)
        return FeatureDraft(target, moved)

    def random(self, target: Reader, seed: int) -> FeatureHead:
        config = FeatureHeadConfig.of(target.config, target.vocabulary)
        head: FeatureHead = random_model(lambda: FeatureHead(config), seed)
        return head


FEATURE_HEAD = FeatureHeadKind()


def with_head(execution: Shape, verifier: Verifier, **parts: Any) -> Recipe:
    """A recipe whose drafts grow out of a feature head; `parts` are further fields."""
    return Recipe(
        architecture=feature_head,
        execution=execution,
        verifier=verifier,
        optimisation="regression on the target's states",
        sees=SEES,
        draft_model=(FEATURE_HEAD,),
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
        draft_model=(SMALL_MODEL, FEATURE_HEAD, MULTI_TOKEN_HEADS),
        **parts,
    )
