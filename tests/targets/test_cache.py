"""Every cache layer of the installed transformers: rolled back exactly, or refused by name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.models
from torch import Tensor
from torch.testing import assert_close
from transformers.cache_utils import (
    BaseQuantizedLayer,
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from mmspec.modalities.vlm import survey
from mmspec.modalities.vlm.tiny_requests import requests
from mmspec.targets import cache
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, build_block
from mmspec.targets.readers.kv_view import gather_view
from mmspec.targets.slots import SlotLayer
from tests.toys import readers

WINDOW = 4
SUPPLY: dict[str, Any] = {
    "max_cache_len": 32,
    "sliding_window": WINDOW,
    "number_of_states": 2,
    "config": SimpleNamespace(
        sliding_window=WINDOW,
        compress_rates={"heavily_compressed_attention": 2, "compressed_sparse_attention": 2},
    ),
}


def layer_classes() -> dict[str, type]:
    """Those that can be made, of the library and of all its modelling files, found by looking."""
    for module in pkgutil.iter_modules(transformers.models.__path__):
        own = Path(transformers.models.__path__[0], module.name, f"modeling_{module.name}.py")
        if own.is_file() and re.search(r"^    _layer_type = ", own.read_text(), re.MULTILINE):
            importlib.import_module(f"transformers.models.{module.name}.modeling_{module.name}")
    found: dict[str, type] = {DummyLayer.__name__: DummyLayer}
    left: list[type] = [CacheLayerMixin, LinearAttentionCacheLayerMixin]
    while left:
        one = left.pop()
        left += one.__subclasses__()
        if one.__module__.startswith("transformers.") and not inspect.isabstract(one):
            found[one.__name__] = one
    return found


LAYERS = layer_classes()


def made(kind: type) -> Any:
    wanted = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in SUPPLY.items() if name in wanted})


def feed(layer: Any, at: int, tokens: int) -> list[Tensor]:
    """Write `tokens` behind `at` others in every way that a layer takes; what it gives back."""
    noise = torch.Generator().manual_seed(at)

    def states(*shape: int) -> Tensor:
        return torch.stack([torch.randn(shape, generator=noise) for _ in range(tokens)], -2)

    given: list[Tensor] = []
    if isinstance(layer, LinearAttentionLayer):
        for place in range(2):
            seen = layer.update_conv_state(states(1, 3).mT, place, conv_kernel_size=3)
            before, new = layer.recurrent_states[place], states(1, 3).sum(-2)
            now = new if before is None else before / 2 + new
            given += [seen.clone(), layer.update_recurrent_state(now, place).clone()]
    for name in ("update_index", "update_indexer"):
        if name in dir(layer):
            shape = (1, 1, 6) if name == "update_index" else (1, 6)
            given.append(getattr(layer, name)(states(*shape)))
    if "store_compression_weights" in dir(layer):
        chunk, _, first = layer.store_compression_weights("compressor", states(1, 6), states(1, 6))
        given += [layer.update_compressor_states("compressor", chunk), torch.tensor(first)]
    if isinstance(layer, CacheLayerMixin):
        given += layer.update(states(1, 2, 8), states(1, 2, 8))
    return given


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_a_layer_forgets_a_rejected_draft_or_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        layer, alone = made(LAYERS[name]), made(LAYERS[name])
    except ImportError:  # of a package that is not here: the library says so, nobody gets one
        assert issubclass(LAYERS[name], BaseQuantizedLayer)
        return
    monkeypatch.setattr(cache, "DynamicCache", lambda config: SimpleNamespace(layers=[layer]))
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    slots = SlotCache(config, 8)
    own, at = slots.layers[0], 0
    for tokens, rejected in ((7, 0), (1, 3), (2, 4), (3, 1)):
        saved = slots.snapshot()
        if rejected:
            slots.plan_uniform(at, rejected)
            feed(own, 100 + at, rejected)
            slots.restore(saved)
        slots.plan_uniform(at, tokens)
        ours, theirs = feed(own, at, tokens), feed(alone, at, tokens)
        at += tokens
        for mine, other in zip(ours, theirs, strict=True):
            if isinstance(own, SlotLayer) and mine.dim() == 4:  # it keeps more than a window
                mine = mine[..., -other.shape[-2] :, :]
            # values beyond an FP8 scale are NaN with torch 2.11, in the layer itself, too
            assert_close(mine, other, atol=0, rtol=0, equal_nan=True)


def test_what_cannot_be_copied_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OpaqueLayer(DynamicLayer):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.quantizer = object()

    layers = [DynamicLayer(), OpaqueLayer()]
    monkeypatch.setattr(cache, "DynamicCache", lambda config: SimpleNamespace(layers=layers))
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace())
    with pytest.raises(
        ValueError, match=r"layer 1 of .*OpaqueLayer.quantizer is a object.*plain decoding"
    ):
        SlotCache(config)


@torch.no_grad()
def test_a_view_of_every_slot_reads_as_the_whole() -> None:
    """Sparse attention: the indexer's keys come along."""
    model = survey.build("DeepseekV32ForCausalLM")
    body, inputs = readers.backbone(model), next(requests(model, 1))
    memory, _, _ = body.prefill({"input_ids": inputs["input_ids"][:1]}, 8)
    assert isinstance(memory, Memory)
    every = torch.arange(memory.lengths[0])[None]
    slots = {index: [every] for index in range(model.config.num_hidden_layers)}
    view = gather_view(memory, model.config, slots, 8).memory
    read = [
        body.read(each, build_block([[11, 23, 42]], None, each.like))[0] for each in (memory, view)
    ]
    assert_close(*read)
