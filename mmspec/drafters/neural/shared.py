"""Drafting with the target's own decoder, with some layers left out, on the target's own cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from mmspec._attributes import delegate_to
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    FirstBlock,
    GraphSteps,
    committed_prefix,
    draft_distribution,
)
from mmspec.drafters.neural.kv import Kv, SameKv, kv_of
from mmspec.drafters.neural.small_model import Autoregressive, steps_of_reader, unread_block
from mmspec.drafters.shapes import Chain
from mmspec.errors import check_number, is_integer
from mmspec.recipe import Kit, Recipe
from mmspec.targets.cache import cross_attention_layers
from mmspec.targets.memory import Memory
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.kv_view import KvView
from mmspec.targets.readers.reader import Reader, replace_module
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class SharedBackbone(DraftModel):
    """The target without the layers in `skip`, or its first `depth` layers; no weights of its own.

    Draft&Verify, SWIFT, LayerSkip; StD and MagicDec with all layers; QSpec with all, in lower
    precision (`change`). It reads the target's cached slots, or the
    view of them that `kv` creates, and writes its draft after them without keeping it: the target's
    scoring overwrites the same slots in every layer, and a view copies them from there. So it
    cannot change the target's output.

    Raises ValueError at construction for recurrent layers (their state cannot be shared), for a
    decoder that is not a list of layers, and for layers that do not exist.
    """

    backbone: Reader  # the target's
    skip: tuple[int, ...] = ()
    depth: int | None = None
    kv: Kv = field(default_factory=SameKv)
    change: Callable[[nn.Linear], nn.Module] | None = None  # what makes the draft's linear layers
    draft_reader: Reader = field(init=False, repr=False)
    layers: tuple[int, ...] = field(init=False, repr=False)  # layers with their own cache

    def __post_init__(self) -> None:
        name = type(self.backbone.model).__name__
        if not self.backbone.can_branch:
            raise ValueError(
                f"{name} {self.backbone.obstacle}, so a draft would change its cache; use a "
                "separate draft model"
            )
        layers = len(self.backbone.layers)
        depth = self.depth
        if depth is not None and not (is_integer(depth) and 1 <= depth <= layers):
            raise ValueError(
                f"depth={depth!r} is not a number of layers; {name} has {layers}, give 1 to "
                f"{layers}"
            )
        unknown = [layer for layer in self.skip if not 0 <= layer < layers]
        if unknown:
            raise ValueError(
                f"skip names layers {unknown}, but {name} has {layers} (0 to {layers - 1})"
            )
        remaining = [at for at in range(layers)[: self.depth] if at not in self.skip]
        if not remaining:
            raise ValueError(f"skip={self.skip}, depth={self.depth} leaves no layer of {name}")
        shared_kv_layers = cross_attention_layers(self.backbone.config)
        object.__setattr__(
            self, "layers", tuple(at for at in remaining if at not in shared_kv_layers)
        )
        own = _drop_layers(self.backbone, self.skip, self.depth, remaining)
        own = own if self.change is None else change_reader(own, self.change)
        object.__setattr__(self, "draft_reader", own)

    sees = delegate_to("kv.sees")
    required_features = delegate_to("kv.required_features")

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        if not isinstance(self.kv, SameKv):
            return "it reads a part of the target's cache, which is copied for every draft"
        return self.draft_reader.compile_blocks(make_graphs)

    def graph_steps(self) -> GraphSteps | None:
        return steps_of_reader(self.draft_reader)

    def first_block(self, context: Context, state: KvView | None) -> FirstBlock:
        counts = [len(row) for row in context.pending_tokens()]
        return FirstBlock(context.memory, unread_block(context), (), counts, lambda: None)

    def begin(self, context: Context) -> KvView | None:
        self.draft_reader.prepare_graphs(context.memory, context.request.max_new_tokens)
        return self.kv.open(context, self.backbone, self.layers)

    def predict_first(self, context: Context, state: KvView | None) -> Categorical:
        layout = unread_block(context)
        tap = None if state is None else self.kv.renewal(context, self.backbone, state)
        if state is None or tap is None:
            logits, _ = self.draft_reader.read(_memory(context, state), layout)
        else:
            with tap:
                logits, _ = self.draft_reader.read(context.memory, layout)
            state.replace_with(self.kv.renew(context, self.backbone, self.layers, tap))
        if state is not None:
            state.drafts += 1
        return draft_distribution(context, logits, committed_prefix(context))

    def predict(self, context: Context, state: KvView | None, nodes: DraftNodes) -> Categorical:
        waiting = len(context.pending_tokens()[0])
        layout = nodes.block(context.memory.like, waiting)
        logits, _ = self.draft_reader.read(_memory(context, state), layout)
        return draft_distribution(context, logits, nodes.prefix(context), nodes.ahead(context))


def _memory(context: Context, view: KvView | None) -> Any:
    """The target's own cache, or the view of it, updated."""
    return context.memory if view is None else view.sync(cast(Memory, context.memory))


def change_reader(reader: Reader, change: Callable[[nn.Linear], nn.Module]) -> Reader:
    """A reader with other linear layers in its decoder; everything else is shared.

    Raises ValueError for a model without any, and for one that is not read as one decoder.
    """
    name = type(reader.model).__name__
    if not isinstance(reader, Backbone):
        raise ValueError(f"{name} is not read as one decoder here; use a recipe such as 'swift'")
    decoder: Any = _change_linears(reader.decoder, change)
    if decoder is reader.decoder:
        raise ValueError(f"{name} has no nn.Linear layers to change; use a recipe such as 'swift'")
    twin = copy.copy(reader)
    if not reader.family.is_direct:
        twin.model = replace_module(twin.model, twin.decoder, decoder)
    twin.decoder = decoder
    return twin


def _change_linears(module: nn.Module, change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    if isinstance(module, nn.Linear):
        return change(module)
    parts = {name: _change_linears(part, change) for name, part in module.named_children()}
    if all(parts[name] is part for name, part in module.named_children()):
        return module
    twin = copy.copy(module)
    twin._modules = {**module._modules, **parts}
    return twin


def spread_layers(layers: int, share: float) -> tuple[int, ...]:
    """About `share` of the inner layers, evenly spread; the first and the last are kept (SWIFT)."""
    inner = max(layers - 2, 0)
    count = min(max(round(share * inner), 1), inner)
    return tuple(1 + int((at + 0.5) * inner / count) for at in range(count))


def _drop_layers(
    backbone: Reader, skip: Sequence[int], depth: int | None, remaining: Sequence[int]
) -> Reader:
    """The decoder without the layers; masks go by index, so `layer_types` are shifted as well."""
    draft_reader = backbone.skip_layers(skip, depth)
    kinds = getattr(draft_reader.decoder.config, "layer_types", None)
    if kinds is not None and [kinds[at] for at in remaining] != kinds[: len(remaining)]:
        config = copy.copy(draft_reader.decoder.config)
        config.layer_types = [kinds[at] for at in remaining] + list(kinds[len(remaining) :])
        draft_reader.decoder.config = config
    return draft_reader


def skipping(kit: Kit) -> Drafter:
    """The target without some layers: those in `skip`, or about `share` of the inner ones."""
    skip, share = kit.options["skip"], kit.options["share"]
    check_number("share", share, 0, 1, example=0.5)
    if skip is None:
        skip = spread_layers(len(kit.target.layers), share)
    if not isinstance(skip, list | tuple) or not all(is_integer(one) for one in skip):
        count = len(kit.target.layers)
        raise ValueError(f"skip={skip!r} are not layers; give their numbers, 0 to {count - 1}")
    return build_shared(kit, skip=tuple(skip))


def early_exit(kit: Kit) -> Drafter:
    """The first `depth` layers of the target, by default a quarter of them."""
    depth = kit.options["depth"]
    if depth is None:
        depth = max(len(kit.target.layers) // 4, 1)
    return build_shared(kit, depth=depth)


def all_layers(kit: Kit) -> Drafter:
    """The target itself, on a part of its cache."""
    return build_shared(kit)


def with_own_layers(
    architecture: Callable[[Kit], Drafter],
    execution: Chain,
    verifier: Verifier,
    kv: str = "same",
    **parts: Any,
) -> Recipe:
    """A recipe whose target drafts for itself, on the part of its cache selected by `kv`.

    `parts` are further fields of the recipe.
    """
    return Recipe(architecture, execution, verifier, sees="target-memory", kv=kv, **parts)


def build_shared(kit: Kit, **layers: Any) -> Drafter:
    """The target's own layers as a draft model, on the part of its cache that `kv` selects."""
    if kit.sees != "target-memory":
        raise ValueError(
            "the target drafts for itself here and reads its own cache; drop sees=, kv= selects "
            "the part to read"
        )
    return Autoregressive(SharedBackbone(kit.target, kv=kv_of(kit), **layers), kit.shape)
