"""Drafting with the target's own decoder, some layers left out, on the target's own memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mmspec.draft import Drafter
from mmspec.drafters.growth import DraftModel, Nodes
from mmspec.drafters.neural.small_model import Autoregressive, committed, draft_law
from mmspec.errors import check_number, is_whole
from mmspec.laws.categorical import Categorical
from mmspec.recipe import Kit
from mmspec.targets.context import Context
from mmspec.targets.memory import block
from mmspec.targets.reader import Reader


@dataclass(frozen=True, eq=False)
class SharedBackbone(DraftModel):
    """The target without the layers in `skip`, or its first `depth` layers; nothing of its own.

    Draft&Verify, SWIFT, LayerSkip. It reads the slots that the target has kept, pictures
    included, and writes its draft behind them without keeping anything: the target's scoring
    writes the same slots anew, in every layer. So nothing it does can change what the target
    says.

    Raises ValueError at construction for recurrent layers (their state cannot be borrowed), for
    families whose logits are not head(decoder), and for layers that do not exist.
    """

    backbone: Reader  # the target's
    skip: tuple[int, ...] = ()
    depth: int | None = None
    thin: Reader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        name = type(self.backbone.model).__name__
        if not self.backbone.can_branch:
            raise ValueError(
                f"{name} has recurrent layers, whose state a draft would advance; use a draft "
                "model of its own"
            )
        if not self.backbone.family.direct:
            raise ValueError(
                f"layers of {name} cannot be left out: its logits are not head(decoder); use a "
                "draft model"
            )
        layers = len(self.backbone.decoder.layers)
        if self.depth is not None and not 1 <= self.depth <= layers:
            raise ValueError(f"depth={self.depth} is no number of layers; {name} has {layers}")
        unknown = [layer for layer in self.skip if not 0 <= layer < layers]
        if unknown:
            raise ValueError(
                f"skip names layers {unknown}, but {name} has {layers} (0 to {layers - 1})"
            )
        left = [at for at in range(layers)[: self.depth] if at not in self.skip]
        if not left:
            raise ValueError(f"skip={self.skip}, depth={self.depth} leaves no layer of {name}")
        object.__setattr__(self, "thin", _thin(self.backbone, self.skip, self.depth, left))

    @property
    def sees(self) -> str:
        return "target-memory"

    def listen(self, context: Context, state: None) -> Categorical:
        waiting = context.waiting()
        if len({len(row) for row in waiting}) > 1:
            raise ValueError(
                "rows wait for different numbers of tokens; a gate needs a draft model"
            )
        layout = block(waiting, None, context.memory.like)
        logits, _ = self.thin.read(context.memory, layout)
        return draft_law(context, logits, committed(context))

    def say(self, context: Context, state: None, nodes: Nodes) -> Categorical:
        waiting = len(context.waiting()[0])
        logits, _ = self.thin.read(context.memory, nodes.block(context.memory.like, waiting))
        return draft_law(context, logits, nodes.prefix(context), nodes.layout.depths + 1)


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
    _check_own_memory(kit)
    skip, count = kit.options["skip"], len(layers_of(kit.target))
    if skip is None:
        share = kit.options["share"]
        check_number("share", share, 0, 1, example=0.5)
        skip = spread(count, share)
    elif not isinstance(skip, list | tuple) or not all(is_whole(one) for one in skip):
        raise ValueError(f"skip={skip!r} are no layers; give their numbers, 0 to {count - 1}")
    return Autoregressive(SharedBackbone(kit.target, tuple(skip)), kit.shape)


def early_exit(kit: Kit) -> Drafter:
    """The first `depth` layers of the target, a quarter of them by default."""
    _check_own_memory(kit)
    depth, count = kit.options["depth"], len(layers_of(kit.target))
    if depth is None:
        depth = max(count // 4, 1)
    check_number("depth", depth, 1, count, whole=True)
    return Autoregressive(SharedBackbone(kit.target, depth=depth), kit.shape)


def layers_of(target: Reader) -> Sequence[Any]:
    """The layers of a decoder that keeps them in a list. Raises ValueError for another."""
    try:
        layers: Sequence[Any] = target.decoder.layers
    except AttributeError:
        raise ValueError(
            f"the layers of {type(target.model).__name__} cannot be left out: they are not in a "
            "list called layers; choose another recipe, such as 'prompt-lookup'"
        ) from None
    return layers


def _check_own_memory(kit: Kit) -> None:
    if kit.sees != "target-memory" or kit.compressor is not None:
        raise ValueError(
            "the target drafts for itself here and sees what it has in its memory; drop sees= and "
            "compressor="
        )
