"""Drafting with a head that attends to the target's own keys and values (AASD)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    committed_prefix,
    draft_distribution,
)
from mmspec.drafters.neural.kv import ProjectedKv, check_viewable
from mmspec.drafters.neural.small_model import build_head_drafter, unread_block
from mmspec.drafters.neural.target_heads import HeadKind, check_axes, check_heads
from mmspec.models.heads.aasd import AasdHead
from mmspec.recipe import STATES, Kit
from mmspec.targets.memory import Memory, TokenBlock
from mmspec.targets.readers.backbone import FULL
from mmspec.targets.readers.kv_view import KvView
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class AasdDraft(DraftModel):
    """A layer over the target's cache, with projected image tokens, and over a draft's own keys.

    Yang et al. 2025. The head's own keys and values are never cached: once the target has read a
    token, its keys and values replace them.

        target's  text, images -> few, tokens read | own  d [x  y]      d newest, x and y drafted

    Raises ValueError at construction for a head of another target, for a target whose cache cannot
    be accessed, and for a layer that it lacks or that does not attend to all tokens.
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
                "the target reads its rows one by one, and its keys and values cannot be attended "
                "to; use a recipe with a head on its states, such as eagle-2"
            )
        layer = memory.cache.layers[self.head.config.kv_layer]
        target_shapes = layer.keys.shape[1::2], layer.values.shape[1::2]
        own = self.head.layer.self_attn
        own_shape = (own.k_proj.out_features // own.head_dim, own.head_dim)
        if any(tuple(one) != own_shape for one in target_shapes):
            raise ValueError(
                f"keys and values of the target are {target_shapes[0]} and {target_shapes[1]} "
                f"(heads, width), those of the head {own_shape}; train a recipe with a head on its "
                "states instead"
            )
        kv = ProjectedKv(self.head.projector)
        return kv.open(context, self.backbone, [self.head.config.kv_layer])

    def predict_first(self, context: Context, state: KvView | None) -> Categorical:
        states = self._read(context, state, unread_block(context))[:, -1:]
        return draft_distribution(context, self.backbone.head(states), committed_prefix(context))

    def predict(self, context: Context, state: KvView | None, nodes: DraftNodes) -> Categorical:
        waiting = len(context.pending_tokens()[0])
        states = self._read(context, state, nodes.block(context.memory.like, waiting))
        logits = self.backbone.head(states)
        return draft_distribution(context, logits, nodes.prefix(context), nodes.ahead(context))

    def _read(self, context: Context, view: KvView | None, layout: TokenBlock) -> Tensor:
        """The head's output (B, q, D) for a block after the target's cache."""
        dense = cast(Memory, context.memory)
        memory = dense if view is None else view.sync(dense)
        positions, mask, _ = memory.place(layout)
        if memory.axes > 1:
            positions = memory.spread_axes(positions)
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
            f"{name} {target.obstacle}, so a draft would change its cache; use a separate draft "
            "model"
        )
    config, layers = head.config, len(target.layers)
    if not 0 <= config.kv_layer < layers or _has_sliding_window(target.config, config.kv_layer):
        raise ValueError(
            f"kv_layer={config.kv_layer} is not a layer of {name} that attends to all tokens; "
            f"train a head for one of its {layers} layers that does, or use eagle-2 where none does"
        )
    check_axes(head, target)
    if config.positions != "mrope" and target.family.rope_axes == 3:
        raise ValueError(
            f"this head has rotary positions on one axis, but {name} on three (M-RoPE); train one "
            "for it"
        )


def _has_sliding_window(config: Any, layer: int) -> bool:
    """Whether a layer has a sliding window; without `layer_types` it applies to all layers."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return bool(getattr(config, "sliding_window", None))
    return bool(kinds[layer] != FULL)


AASD_HEAD = HeadKind(AasdHead, AasdDraft, "AASD head")


def kv_head(kit: Kit) -> Drafter:
    """A layer over the target's own keys and values."""
    return build_head_drafter(kit)
