"""Drafting with the target's own decoder, some layers left out, on the target's own memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mmspec.declared import answered_by
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.growth import Chain, DraftModel, Nodes
from mmspec.drafters.neural.kv import Kv, SameKv, kv_of
from mmspec.drafters.neural.small_model import (
    Autoregressive,
    committed,
    draft_distribution,
    unread_block,
)
from mmspec.errors import check_number, is_whole
from mmspec.recipe import Kit, Recipe
from mmspec.targets.cache import crossed_layers
from mmspec.targets.memory import Memory
from mmspec.targets.readers.kv_view import KvView
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class SharedBackbone(DraftModel):
    """The target without the layers in `skip`, or its first `depth` layers; nothing of its own.

    Draft&Verify, SWIFT, LayerSkip; StD with all layers. It reads the slots that the target has
    kept, or the view of them that `kv` makes, and writes its draft behind them without keeping
    anything: the target's scoring writes the same slots anew, in every layer, and a view takes
    them from there. So nothing it does can change what the target says.

    Raises ValueError at construction for recurrent layers (their state cannot be borrowed), for a
    decoder that is no list of layers, and for layers that do not exist.
    """

    backbone: Reader  # the target's
    skip: tuple[int, ...] = ()
    depth: int | None = None
    kv: Kv = field(default_factory=SameKv)
    thin: Reader = field(init=False, repr=False)
    layers: tuple[int, ...] = field(init=False, repr=False)  # that keep slots

    def __post_init__(self) -> None:
        name = type(self.backbone.model).__name__
        if not self.backbone.can_branch:
            raise ValueError(
                f"{name} {self.backbone.obstacle}, so a draft would disturb what it remembers; use "
                "a draft model of its own"
            )
        layers = len(self.backbone.layers)
        depth = self.depth
        if depth is not None and not (is_whole(depth) and 1 <= depth <= layers):
            raise ValueError(
                f"depth={depth!r} is no number of layers; {name} has {layers}, give 1 to {layers}"
            )
        unknown = [layer for layer in self.skip if not 0 <= layer < layers]
        if unknown:
            raise ValueError(
                f"skip names layers {unknown}, but {name} has {layers} (0 to {layers - 1})"
            )
        left = [at for at in range(layers)[: self.depth] if at not in self.skip]
        if not left:
            raise ValueError(f"skip={self.skip}, depth={self.depth} leaves no layer of {name}")
        crossed = crossed_layers(self.backbone.config)
        object.__setattr__(self, "layers", tuple(at for at in left if at not in crossed))
        object.__setattr__(self, "thin", _thin(self.backbone, self.skip, self.depth, left))

    sees = answered_by("kv.sees")
    wants = answered_by("kv.wants")

    def begin(self, context: Context) -> KvView | None:
        return self.kv.open(context, self.backbone, self.layers)

    def predict_first(self, context: Context, state: KvView | None) -> Categorical:
        layout = unread_block(context)
        tap = None if state is None else self.kv.renewal(context, self.backbone, state)
        if state is None or tap is None:
            logits, _ = self.thin.read(_memory(context, state), layout)
        else:
            with tap:
                logits, _ = self.thin.read(context.memory, layout)
            state.become(self.kv.renew(context, self.backbone, self.layers, tap))
        if state is not None:
            state.drafts += 1
        return draft_distribution(context, logits, committed(context))

    def predict(self, context: Context, state: KvView | None, nodes: Nodes) -> Categorical:
        waiting = len(context.waiting()[0])
        layout = nodes.block(context.memory.like, waiting)
        logits, _ = self.thin.read(_memory(context, state), layout)
        return draft_distribution(context, logits, nodes.prefix(context), nodes.layout.depths + 1)


def _memory(context: Context, view: KvView | None) -> Any:
    """The target's own memory, or the view of it with all that the target has kept since."""
    return context.memory if view is None else view.follow(cast(Memory, context.memory))


def spread(layers: int, share: float) -> tuple[int, ...]:
    """About `share` of the inner layers, evenly spread; the first and the last are kept (SWIFT)."""
    inner = max(layers - 2, 0)
    count = min(max(round(share * inner), 1), inner)
    return tuple(1 + int((at + 0.5) * inner / count) for at in range(count))


def _thin(backbone: Reader, skip: Sequence[int], depth: int | None, left: Sequence[int]) -> Reader:
    """The decoder without the layers; masks go by place in it, so layer kinds move up as well."""
    thin = backbone.thinned(skip, depth)
    kinds = getattr(thin.decoder.config, "layer_types", None)
    if kinds is not None and [kinds[at] for at in left] != kinds[: len(left)]:
        config = copy.copy(thin.decoder.config)
        config.layer_types = [kinds[at] for at in left] + list(kinds[len(left) :])
        thin.decoder.config = config
    return thin


def skipping(kit: Kit) -> Drafter:
    """The target without some layers: those in `skip`, or about `share` of the inner ones."""
    skip, share = kit.options["skip"], kit.options["share"]
    check_number("share", share, 0, 1, example=0.5)
    if skip is None:
        skip = spread(len(kit.target.layers), share)
    if not isinstance(skip, list | tuple) or not all(is_whole(one) for one in skip):
        count = len(kit.target.layers)
        raise ValueError(f"skip={skip!r} are no layers; give their numbers, 0 to {count - 1}")
    return _shared(kit, skip=tuple(skip))


def early_exit(kit: Kit) -> Drafter:
    """The first `depth` layers of the target, a quarter of them by default."""
    depth = kit.options["depth"]
    if depth is None:
        depth = max(len(kit.target.layers) // 4, 1)
    return _shared(kit, depth=depth)


def all_layers(kit: Kit) -> Drafter:
    """The target itself, on a part of its memory."""
    return _shared(kit)


def with_own_layers(
    architecture: Callable[[Kit], Drafter],
    execution: Chain,
    verifier: Verifier,
    kv: str = "same",
    **parts: Any,
) -> Recipe:
    """A recipe whose target drafts for itself, on the part of its memory that `kv` makes.

    `parts` are further fields.
    """
    return Recipe(architecture, execution, verifier, sees="target-memory", kv=kv, **parts)


def _shared(kit: Kit, **layers: Any) -> Drafter:
    if kit.sees != "target-memory":
        raise ValueError(
            "the target drafts for itself here and sees what it has in its memory; drop sees=, "
            "kv= says how much of that"
        )
    return Autoregressive(SharedBackbone(kit.target, kv=kv_of(kit), **layers), kit.shape)
