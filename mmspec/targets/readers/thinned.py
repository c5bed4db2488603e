"""Models with some layers left out: shallow copies that share every weight."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from mmspec import _hf


def layer_list(decoder: nn.Module) -> str:
    """The name of a decoder's list of layers, its longest one. Raises ValueError without any."""
    lists = {n: part for n, part in decoder.named_children() if isinstance(part, nn.ModuleList)}
    if not lists:
        raise ValueError(
            f"{type(decoder).__name__} has no list of layers, so none can be left out or watched; "
            "use a draft model, and no compressor that asks the target"
        )
    return max(lists, key=lambda name: len(lists[name]))


def without_layers(decoder: Any, skip: Sequence[int], depth: int | None = None) -> Any:
    """A shallow copy of a decoder, weights shared, with its own list of layers."""
    name = layer_list(decoder)
    layers = list(decoder.get_submodule(name))[:depth]
    twin = copy.copy(decoder)
    twin._modules = dict(decoder._modules)
    left = [layer for index, layer in enumerate(layers) if index not in set(skip)]
    twin._modules[name] = nn.ModuleList(left)
    return twin


def replaced(model: nn.Module, part: nn.Module, other: nn.Module) -> Any:
    """A shallow copy of a model, weights shared, with another module in the place of one."""
    if model is part:
        return other
    name = next(n for n, child in model.named_children() if any(m is part for m in child.modules()))
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    twin._modules[name] = replaced(model.get_submodule(name), part, other)
    return twin


def apart(reader: Any, depth: int | None = None) -> Any:
    """The same weights read through shallow copies: nothing of a prompt is noted on the model.

    `depth` keeps only the first layers. The reader itself where it has no list of layers.
    """
    try:
        twin = reader.thinned((), depth)
    except ValueError:
        return reader
    if twin.model is reader.model:
        twin.model = replaced(_hf.uncompiled(reader.model), reader.decoder, twin.decoder)
    return twin


def first_kinds(reader: Any, slots: Sequence[Any]) -> Any:
    """The reader of its first layers: as many as hold one of each kind, and one more.

    That one reads what the others left of a prompt in its cache, `slots`. Layers are of one kind
    where all their modules and settings are the same but for the index. None where no layer is left
    out; raises ValueError where they cannot be told.
    """
    layers = list(reader.layers)
    named = vars(reader.config).get("layer_types") or [None] * len(layers)
    windows = [(type(slot), vars(slot).get("window")) for slot in slots]
    kinds = [(_kind(layer), *other) for layer, *other in zip(layers, named, windows, strict=True)]
    depth = max(kinds.index(kind) for kind in kinds) + 2
    return None if depth >= len(layers) else apart(reader, depth)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """The classes and plain settings of a layer's modules."""
    return tuple(
        (type(part), *((n, v) for n, v in vars(part).items() if type(v) in _PLAIN and _tells(n)))
        for part in layer.modules()
    )


_PLAIN = frozenset((bool, int, float, str, type(None)))


def _tells(name: str) -> bool:
    """Whether a setting says more than which layer it is."""
    return not name.startswith("_") and name.rpartition("_")[2] not in ("idx", "index", "id")
