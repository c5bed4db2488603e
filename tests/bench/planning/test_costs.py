"""The cost model against real parameter counts, enumeration, and data sheets."""

from __future__ import annotations

import itertools

import pytest
import torch

from mmspec.bench.planning.costs import Decoding, Split, eagle_head, expected_tokens
from mmspec.bench.planning.devices import A100, DEVICES, H100, find_device
from mmspec.bench.studies.shapes import SHAPES, build_model

SEVEN = SHAPES["llava-1.5-7b"]


@pytest.mark.parametrize("shape", ["tiny", "small"])
def test_weights_are_those_of_the_model(shape: str) -> None:
    with torch.device("meta"):
        model = build_model.__globals__["_random"](
            SHAPES[shape], torch.device("meta"), torch.float32, 64, 0
        )
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    split = Split(SHAPES[shape], H100)
    assert split.weight_bytes == H100.bytes_per_value * matrices  # norms do not count


def test_a_slot_of_llava_takes_half_a_megabyte() -> None:
    assert Split(SEVEN, H100).slot_bytes == 2 * 32 * 32 * 128 * 2


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_expected_tokens_are_those_of_enumeration(length: int, acceptance: float) -> None:
    total = 0.0
    for coins in itertools.product((True, False), repeat=length):
        chance = 1.0
        for coin in coins:
            chance *= acceptance if coin else 1 - acceptance
        accepted = next((at for at, coin in enumerate(coins) if not coin), length)
        total += chance * (accepted + 1)
    assert expected_tokens(length, acceptance) == pytest.approx(total)


def test_one_token_takes_the_time_that_the_weights_take_to_read() -> None:
    split = Split(SEVEN, H100)
    read = (split.weight_bytes - SEVEN.vocabulary * SEVEN.hidden * 2) / (3.35e12 * 0.75)
    assert split.forward(1, 1, 0) == pytest.approx(read + 32 * H100.layer_seconds, rel=0.01)
    long = split.forward(1, 1, 100_000) - split.forward(1, 1, 0)
    assert long == pytest.approx(100_000 * split.slot_bytes / (3.35e12 * 0.75), rel=0.01)


def test_a_long_prompt_takes_the_time_of_its_arithmetic() -> None:
    split = Split(SEVEN, H100)
    flops = 2 * 32 * split.layer_weights * 4096
    assert split.forward(1, 4096, scored=1) == pytest.approx(flops / (989e12 * 0.6), rel=0.2)


def test_tensor_parallel_divides_the_weights_and_adds_sums() -> None:
    whole, four = Split(SEVEN, A100), Split(SEVEN, A100, 4)
    assert four.weight_bytes == whole.weight_bytes / 4
    sums = 2 * 32 * A100.all_reduce(4096 * 2, 4)
    fixed = 32 * A100.layer_seconds
    alone = whole.forward(1, 1, 0) - fixed
    assert four.forward(1, 1, 0) == pytest.approx(alone / 4 + fixed + sums, rel=0.01)
    assert A100.all_reduce(1e9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / 300e9, rel=0.05)
    assert A100.all_reduce(1e9, 16) > 5 * A100.all_reduce(1e9, 8)  # over the network
    with pytest.raises(ValueError, match="8 devices do not divide 28 heads and 4 key-value"):
        Split(SHAPES["qwen2.5-vl-7b"], A100, 8)


def test_what_does_not_fit_has_no_slots() -> None:
    assert Split(SHAPES["qwen2.5-vl-72b"], H100).max_slots == 0
    fits = Split(SHAPES["qwen2.5-vl-72b"], H100, 4)
    assert fits.max_slots > 100_000
    head = Split(eagle_head(fits.shape), H100)
    assert 0 < Decoding(fits, head).max_slots < fits.max_slots


def test_devices_are_found_by_name() -> None:
    assert find_device("h100") is DEVICES["h100"]
    with pytest.raises(ValueError, match="unknown device 'b300'; known devices: h100, a100"):
        find_device("b300")
