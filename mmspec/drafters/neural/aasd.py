"""Drafting with a head that attends to the target's own keys and values (AASD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.growth import DraftModel, Nodes
from mmspec.drafters.neural.head_kind import HeadKind
from mmspec.drafters.neural.kv import ProjectedKv, check_viewable
from mmspec.drafters.neural.small_model import (
    committed,
    draft_distribution,
    head_of_target,
    unread_block,
)
from mmspec.drafters.neural.target_states import check_axes, check_heads
from mmspec.models.heads.aasd import AasdHead
from mmspec.recipe import STATES, Kit
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import FULL
from mmspec.targets.readers.kv_view import KvView
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class AasdDraft(DraftModel):
    """A layer over the target's memory, pictures projected, and over its own of a draft.

    Yang et al. 2025. Nothing that it writes is kept: as soon as the target has read a token, its
    own keys and values take the place of the head's.

        target's  text, pictures -> few, tokens read | own  d [x  y]      d newest, x and y drafted

    Raises ValueError at construction for a head of another target, for a target whose memory cannot
    be looked into, and for a layer that it has not or that does not attend to everything.
    """

    backbone: Reader  # the target's
    head: AasdHead
    sees: ClassVar[str] = STATES

    def __post_init__(self) -> None:
        check_aasd(self.head, self.backbone)

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.head,)

    def begin(self, context: Context) -> KvView | None:
        memory = context.memory
        if not isinstance(memory, Memory) or memory.is_stepwise:
            raise ValueError(
                "the target is read in its own steps, row by row, and its keys and values cannot "
                "be attended to; use a recipe with a head on its states, such as eagle-2"
            )
        layer = memory.cache.layers[self.head.config.kv_layer]
        found = layer.keys.shape[1::2], layer.values.shape[1::2]
        own = self.head.layer.self_attn
        ours = (own.k_proj.out_features // own.head_dim, own.head_dim)
        if any(tuple(one) != ours for one in found):
            raise ValueError(
                f"keys and values of the target are {found[0]} and {found[1]} (heads, width), "
                f"those of the head {ours}; train a recipe with a head on its states instead"
            )
        kv = ProjectedKv(self.head.projector)
        return kv.open(context, self.backbone, [self.head.config.kv_layer])

    def predict_first(self, context: Context, state: KvView | None) -> Categorical:
        said = self._read(context, state, unread_block(context))[:, -1:]
        return draft_distribution(context, self.backbone.head(said), committed(context))

    def predict(self, context: Context, state: KvView | None, nodes: Nodes) -> Categorical:
        waiting = len(context.waiting()[0])
        said = self._read(context, state, nodes.block(context.memory.like, waiting))
        logits = self.backbone.head(said)
        return draft_distribution(context, logits, nodes.prefix(context), nodes.layout.depths + 1)

    def _read(self, context: Context, view: KvView | None, layout: TokenBlock) -> Tensor:
        """What the head gives (B, q, D) of a block behind what the target keeps."""
        dense = cast(Memory, context.memory)
        memory = dense if view is None else view.follow(dense)
        positions, mask, _ = memory.place(layout)
        if memory.axes > 1:
            positions = memory.on_axes(positions)
        out: Tensor = self.head(
            self.backbone.embed(layout.tokens),
            mask,
            positions[-3:] if memory.axes > 1 else positions,
            memory.cache,
        )
        return out


def check_aasd(head: Any, target: Reader) -> None:
    """Refuse a head that was not made for this target. Raises ValueError."""
    check_heads(head, target)
    check_viewable(target)
    name = type(target.model).__name__
    if not target.can_branch:
        raise ValueError(
            f"{name} {target.obstacle}, so a draft would disturb what it remembers; use a draft "
            "model of its own"
        )
    config, layers = head.config, len(target.layers)
    if not 0 <= config.kv_layer < layers or _slides(target.config, config.kv_layer):
        raise ValueError(
            f"kv_layer={config.kv_layer} is no layer of {name} that attends to everything; train a "
            f"head for one of its {layers} layers that does, or use eagle-2 where none does"
        )
    check_axes(head, target)
    if config.positions != "mrope" and target.family.rope_axes == 3:
        raise ValueError(
            f"this head turns on one axis, but {name} on three (M-RoPE); train a head for it"
        )


def _slides(config: Any, layer: int) -> bool:
    """Whether a layer forgets; where no kinds of layers are named, a window is that of all."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return bool(getattr(config, "sliding_window", None))
    return bool(kinds[layer] != FULL)


AASD_HEAD = HeadKind(AasdHead, AasdDraft, "AASD head")


def kv_head(kit: Kit) -> Drafter:
    """A layer over the target's own keys and values."""
    return head_of_target(kit)
