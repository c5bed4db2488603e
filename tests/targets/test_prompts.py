"""Padded prompts: their lengths, and which slots a token attends to."""

from __future__ import annotations

import pytest
import torch

from mmspec.targets.prompts import SLIDING, PromptTensors, make_masks, round_prompt

FULL = "full_attention"


def test_lengths_are_few_and_near() -> None:
    found = {round_prompt(length) for length in range(1, 2049)}
    assert len(found) == 24
    assert all(length <= round_prompt(length) < length + 16 for length in range(1, 129))
    assert all(round_prompt(length) <= 1.25 * length for length in range(129, 2049))


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_attends_to_real_slots_before_it(window: int | None) -> None:
    visible = torch.ones(3, 5, dtype=torch.int64)
    visible[1, :2] = 0
    prompt = PromptTensors((torch.arange(15).view(3, 5),), torch.arange(5)[None], visible)
    parts = [torch.zeros(4, 2, 256, 8)] * 2
    positions, (carrier,), hidden, _, _ = prompt.place(parts)
    assert carrier.shape == positions.shape == hidden.shape == (4, 16)
    kinds = (FULL,) if window is None else (FULL, SLIDING)
    for kind, mask in make_masks(hidden, kinds, window).items():
        for row in range(3):
            for query in range(5):
                seen = (mask[row, 0, query] == 0).nonzero()[:, 0].tolist()
                first = 0 if window is None or kind == FULL else query - window + 1
                assert seen == [key for key in range(max(first, 0), query + 1) if visible[row, key]]


def test_prompts_of_one_key_differ_in_length_only() -> None:
    def make(batch: int, length: int, width: int | None = None, axes: int = 1) -> PromptTensors:
        shape = (batch, length) if width is None else (batch, length, width)
        positions = torch.zeros(*((axes,) if axes > 1 else ()), batch, length)
        return PromptTensors((torch.zeros(shape),), positions)

    assert make(3, 5).key == make(4, 90).key
    others = {make(*given).key for given in ((1, 5), (2, 5), (2, 5, 8), (2, 5, 8, 3))}
    assert len(others) == 4
