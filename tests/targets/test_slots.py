"""Pooled buffers hold what buffers of single layers hold, whatever is written, moved or grown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import mmspec
from mmspec.targets import slots
from mmspec.targets.cache import SlotCache
from tests import toys

LAYERS, BATCH, HEADS, WIDTH = 3, 2, 2, 4


def make_caches(window: int | None = None) -> tuple[SlotCache, SlotCache]:
    """A cache with a pool, and one whose layers have buffers of their own."""
    config = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    pooled, single = SlotCache(config, 8), SlotCache(config, 8)
    layers: list[Any] = single.layers
    for layer in layers:
        layer.pool_index = None
    for layer in (*pooled.layers, *layers):
        layer.window = window
    return pooled, single


def write(caches: tuple[SlotCache, SlotCache], length: int, seed: int) -> None:
    """Write the same states to both, and compare what a model would read."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(LAYERS):
        shape = (BATCH, HEADS, length, WIDTH)
        states = [torch.randn(shape, generator=generator) for _ in range(2)]
        with torch.no_grad():
            mine, other = (cache.update(states[0], states[1], index) for cache in caches)
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def compare(caches: tuple[SlotCache, SlotCache], length: int) -> None:
    for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
        for name in ("keys", "values"):
            pair: list[Tensor] = [getattr(one, name)[:, :, :length] for one in (mine, other)]
            assert torch.equal(*pair)


def test_a_pool_is_used_where_layers_are_alike() -> None:
    pooled, single = caches = make_caches()
    pooled.plan_uniform(0, 2)
    single.plan_uniform(0, 2)
    write(caches, 2, 0)
    assert all(layer.is_pooled for layer in pooled.layers)
    assert not any(layer.is_pooled for layer in single.layers)


def test_blocks_written_again_grown_and_moved_are_those_of_single_buffers() -> None:
    caches = make_caches()
    source, target = torch.tensor([[6, 7], [7, 7]]), torch.tensor([[5, 6], [4, 7]])
    for start, length in ((0, 4), (4, 4), (4, 4), (6, 1), (7, 5), (12, 1), (13, 30)):
        for cache in caches:
            cache.plan_uniform(start, length)
        write(caches, length, start)
        if start == 6:
            for cache in caches:
                cache.move(source, target)
            compare(caches, 7)
    compare(caches, 43)
    assert all(layer.is_pooled for layer in caches[0].layers)  # also after growth


def test_rows_of_different_length_and_windows_read_the_same() -> None:
    caches = make_caches(window=3)
    for cache in caches:
        cache.plan_uniform(0, 5)
    write(caches, 5, 0)
    for cache in caches:
        cache.plan_rows(torch.tensor([[5, 6], [3, 4]]), 7)
        cache.plan.low = 1
    write(caches, 2, 1)
    for cache in caches:
        cache.plan_uniform(7, 1)
        cache.plan.low = 4
    write(caches, 1, 2)
    compare(caches, 8)


@pytest.mark.parametrize("reason", ["gradients", "size", "widths"])
def test_other_layers_have_buffers_of_their_own(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled, _ = make_caches()
    pooled.plan_uniform(0, 1)
    if reason == "size":
        monkeypatch.setattr(slots, "MAX_POOL_BYTES", 100)
    keys = torch.randn(BATCH, HEADS, 1, WIDTH)
    values = keys[..., :2] if reason == "widths" else keys
    with torch.set_grad_enabled(reason == "gradients"):
        read = pooled.update(keys, values, 0)
    assert not pooled.layers[0].is_pooled
    assert torch.equal(read[0], keys)
    assert torch.equal(read[1], values)


def test_a_cache_of_the_same_layers_has_a_pool_of_its_own() -> None:
    pooled, single = make_caches()
    twins = (pooled.make_empty(), single.make_empty())
    for cache in (pooled, single, *twins):
        cache.plan_uniform(0, 2)
    write((pooled, single), 2, 0)
    write(twins, 2, 1)
    compare((pooled, single), 2)
    assert not torch.equal(pooled.layers[0].keys, twins[0].layers[0].keys)


def test_a_batch_beyond_memory_names_the_largest_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is written on a host, and where an accelerator finds no memory."""
    fast = mmspec.accelerate(toys.model("llama"), "prompt-lookup")
    inputs: dict[str, Any] = {
        **toys.inputs("llama", batch=8),
        "do_sample": False,
        "max_new_tokens": 4,
    }
    config = fast.model.config
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    row = 2 * config.num_hidden_layers * width * inputs["input_ids"].shape[1] * 4  # bytes
    free = [3 * row + 1]
    monkeypatch.setattr(slots, "CHECKED_BYTES", 0)
    monkeypatch.setattr("mmspec.models.footprint.free_bytes", lambda _: free[0])
    with pytest.raises(ValueError, match=r"8 rows of .* the largest batch that fits has 3 rows"):
        fast.generate(**inputs)
    first = {
        name: value[:3] if isinstance(value, Tensor) else value for name, value in inputs.items()
    }
    assert len(fast.generate(**first).sequences) == 3
    free[0] = row - 1
    with pytest.raises(torch.OutOfMemoryError, match="not even one row fits"):
        fast.generate(**inputs)

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(slots, "CHECKED_BYTES", 2**40)
    free[0] = 10**9
    monkeypatch.setattr(slots.SlotPool, "allocate", fail)
    with pytest.raises(slots.BatchTooLarge, match=r"8 rows of .* fits has [0-9]{3,} rows"):
        fast.generate(**inputs)
