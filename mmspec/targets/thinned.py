"""Models with some layers left out: shallow copies that share every weight."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn


def layer_list(decoder: nn.Module) -> str:
    """The name of a decoder's list of layers, its longest one. Raises ValueError without any."""
    lists = {n: part for n, part in decoder.named_children() if isinstance(part, nn.ModuleList)}
    if not lists:
        raise ValueError(
            f"{type(decoder).__name__} has no list of layers, so none can be left out; use a draft "
            "model"
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
