"""The cache of transformers under the names of 5.23 and 5.24, a static one; hooks of accelerate."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig, GenerationMixin
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of 5.24, of 5.23, of Mamba in 5.23
# what the installed version calls the cache: an argument of its layers and attention models, and
# a field of their outputs
CACHE_NAME = next(
    name
    for name in CACHE_NAMES
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


def output_cache(out: Any) -> Any:
    """The cache in the output of a model or of `generate()`; None where it has none."""
    fields = vars(out)
    return next((fields[name] for name in CACHE_NAMES if fields.get(name) is not None), None)


def name_cache(arguments: Mapping[str, Any], name: str = CACHE_NAME) -> dict[str, Any]:
    """Arguments with the cache, if there is one, under `name`. Raises ValueError for two caches."""
    given = dict(arguments)
    cache = pop_cache(given)
    return given if cache is None else {**given, name: cache}


def pop_cache(arguments: dict[str, Any]) -> Any:
    """Remove the cache from arguments, under any of its names; None where there is none.

    Raises ValueError for two caches.
    """
    given = {name: arguments.pop(name) for name in CACHE_NAMES if name in arguments}
    given = {name: one for name, one in given.items() if one is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are the same argument; give one of them")
    return next(iter(given.values()), None)


def cached_length(cache: Any) -> int:
    """Tokens in a cache; 0 where only recurrent layers hold a state, which count none."""
    return int(cache.get_seq_length()) if cache is not None and counts_tokens(cache) else 0


def has_unknown_length(cache: Any) -> bool:
    """Whether a cache holds states of recurrent layers only, of an unknown number of tokens."""
    states = (x for x in cache.layers if isinstance(x, LinearAttentionCacheLayerMixin))
    return not counts_tokens(cache) and any(
        any(layer.has_previous_state.values()) for layer in states
    )


def counts_tokens(cache: Any) -> bool:
    """Whether a layer of a cache stores keys; recurrent layers do not count their tokens."""
    return any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def is_user_cache(cache: Any) -> bool:
    """Whether a cache was given by the user, and not created by `generate()`."""
    return bool(vars(cache).get("_is_user_defined"))


def execution_device(module: nn.Module) -> torch.device:
    """The device that a module computes on; weights that are offloaded come there for a call."""
    hook: Any = vars(module).get("_hf_hook")
    device = getattr(hook, "execution_device", None)
    if device is None:
        weight = next(module.parameters())
        return weight.device
    return torch.device(f"cuda:{device}" if isinstance(device, int) else device)


def is_spread(model: nn.Module) -> bool:
    """Whether the parts of a model lie on several devices, in memory or on disk."""
    places = vars(model).get("hf_device_map") or {}
    return len(set(map(str, places.values()))) > 1 or "disk" in places.values()


def compiled_generation(mode: str) -> dict[str, Any]:
    """Arguments with which `generate()` compiles its steps of one token, also on a CPU."""
    config: Any = CompileConfig(mode=mode)
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}
