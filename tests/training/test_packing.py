"""Rows in one sequence: the losses and gradients of the rows one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.drafters.neural import head_prompt as slots
from mmspec.drafters.neural.feature_head import tap_of
from mmspec.drafters.neural.head_prompt import HeadPrompt, head_prompt
from mmspec.models.heads.dflash import DFlashHead
from mmspec.training.dflash import DFLASH
from mmspec.training.heads import EAGLE, TrainingExample, head_loss, read_example
from mmspec.training.packing import (
    assign_rows,
    check_packing,
    count_slots,
    measure_padding,
)
from mmspec.training.self_fed import EAGLE3, HASS, aligned_loss, eagle3_loss
from mmspec.training.small_model import TEXT_ONLY
from mmspec.training.trainable import HeadTraining
from mmspec.training.vispec import VISPEC
from tests.drafters.state_heads import head_of, lesson, target
from tests.toys.readers import backbone

ROWS, LENGTHS = 6, (10, 6, 1, 8, 3, 9)
LOSSES: dict[str, Any] = {
    "eagle-3": partial(eagle3_loss, passes=4),
    "hass": partial(aligned_loss, noise=0.0),
    "eagle": partial(head_loss, noise=0.0),
}


def ragged_lesson(family: str) -> TrainingExample:
    """Responses of different lengths."""
    example = lesson(family, ROWS)
    tokens = example.tokens.clone()
    for row, length in enumerate(LENGTHS):
        tokens[row, length:] = -1
    return TrainingExample(example.inputs, tokens)


def loss_and_gradients(name: str, head: Any, reader: Any, example: Any) -> list[Tensor]:
    head.zero_grad()
    loss = LOSSES[name](reader, head, example)
    loss.backward()
    return [loss.detach(), *(one.grad for one in head.parameters() if one.grad is not None)]


def packed_length(example: TrainingExample) -> int:
    """Room for three rows."""
    sizes = example.inputs["attention_mask"].sum(-1) + (example.tokens >= 0).sum(-1)
    return 3 * int(sizes.max())


@pytest.mark.parametrize(
    ("family", "maker", "loss", "parts"),
    [
        ("qwen2_5_vl", "eagle3", "eagle-3", {"positions": "mrope", "visual_slots": "placeholder"}),
        ("llava", "eagle3", "eagle-3", {"sliding_window": 40, "draft_vocab_size": 120}),
        (
            "qwen2_5_vl",
            "feature",
            "hass",
            {"visual_slots": "hidden", "positions": "compact", "num_steps": 2},
        ),
        ("llava", "feature", "eagle", {"num_hidden_layers": 2, "sliding_window": 40}),
    ],
)
def test_a_packed_loss_is_that_of_its_rows(
    family: str, maker: str, loss: str, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong variants: rows attend to those before them; positions do not restart."""
    example, reader = ragged_lesson(family), backbone(target(family))
    head, length = head_of(family, maker, **parts), packed_length(example)
    packed = replace(example, pack=length)
    read = read_example(reader, packed, tap_of(head, reader))
    assert 1 < len(read.next) < ROWS
    assert read.prompt.embeds.shape[1] <= length
    expected = loss_and_gradients(loss, head, reader, example)
    for own, one in zip(loss_and_gradients(loss, head, reader, packed), expected, strict=True):
        assert_close(own, one, atol=2e-5, rtol=2e-4)

    def attend_to_all(prompt: HeadPrompt) -> Tensor:
        count = prompt.embeds.shape[1]
        return prompt.attention_mask[:, None, None] & torch.ones(count, count).bool().tril()

    monkeypatch.setattr(HeadPrompt, "causal_mask", attend_to_all)
    wrong = loss_and_gradients(loss, head, reader, packed)
    assert not torch.allclose(wrong[0], expected[0], atol=1e-4, rtol=0)
    monkeypatch.undo()
    if parts.get("positions") == "mrope":
        return  # positions are the target's
    # rotation depends on distances alone, so a wrong start of a row shows in its positions only
    prompt = head_prompt(head, reader, read.prompt)
    assert prompt.segments is not None
    starts = slots.index_in_segment(prompt.segments.ids) == 0
    assert not prompt.positions[starts].any()


def test_a_row_in_one_sequence_reads_what_it_reads_alone() -> None:
    """Inputs, positions on three axes, and where the responses are; padding is on the left."""
    example, reader = ragged_lesson("qwen2_5_vl"), backbone(target("qwen2_5_vl"))
    head = head_of("qwen2_5_vl", "eagle3", positions="mrope", visual_slots="placeholder")
    names = (tap_of(head, reader),)
    alone = head_prompt(head, reader, read_example(reader, example, *names).prompt)
    read = read_example(reader, replace(example, pack=packed_length(example)), *names)
    packed = head_prompt(head, reader, read.prompt)
    assert packed.segments is not None
    assert read.rows is not None
    width = example.tokens.shape[1]
    for row, length in enumerate(LENGTHS):
        stop = alone.embeds.shape[1] - width + length
        own = packed.segments.ids == row
        for name in ("embeds", "states"):
            mine, theirs = vars(packed)[name][own], vars(alone)[name][row, alone.pads[row] : stop]
            assert_close(mine, theirs)
        assert torch.equal(
            packed.positions[:, own], alone.positions[:, row, alone.pads[row] : stop]
        )
        assert int((own & packed.segments.is_response).sum()) == length
        assert torch.equal(read.rows == row, read.real & (read.rows == row))
    assert int(read.real.sum()) == sum(LENGTHS)
    for ids, pad in zip(packed.segments.ids, packed.pads, strict=True):
        assert bool((ids[:pad] < 0).all() and (ids[pad:] >= 0).all())


def test_rows_are_assigned_with_little_padding() -> None:
    sizes = [5, 3, 2, 6, 4]
    assert assign_rows(sizes, 10) == [[0, 1, 2], [3, 4]]
    assert assign_rows([12, 3], 10) == [[0], [1]]  # a longer one is alone
    assert assign_rows([4] * 8, 13) == [[row] for row in range(8)]  # not 3, 3 and 2
    for length in range(6, 21):
        found = assign_rows(sizes, length)
        assert sorted(row for rows in found for row in rows) == list(range(5))
        longest = max(sum(sizes[row] for row in rows) for rows in found)
        assert longest <= length
        assert longest * len(found) <= 6 * 5  # no worse than one by one


def test_padding_is_counted_as_it_is_read() -> None:
    batch = [(3, 2), (1, 2), (1, 1), (4, 2), (3, 1)]
    assert count_slots(batch, None) == 5 * (4 + 2)
    assert count_slots(batch, 10) == 20
    assert measure_padding([batch], 10) == (20, 0)
    assert_close(torch.tensor(measure_padding([batch], None)), torch.tensor((20.0, 1 / 3)))


@pytest.mark.parametrize(
    ("training", "maker", "parts", "message"),
    [
        (VISPEC, "feature", {"visual_slots": "compressed", "num_q": 2}, "lays out rows"),
        (EAGLE, "feature", {"visual_slots": "compressed", "num_q": 2}, "by its question"),
        (EAGLE, "feature", {"visual_keep": 0.5}, "attention over whole rows"),
        (DFLASH, DFlashHead, {}, "a DFlashHead lays out rows"),
        (TEXT_ONLY, torch.nn.Linear, {}, "a Linear lays out rows"),
        (EAGLE3, torch.nn.Linear, {}, "reads no slots"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    training: HeadTraining, maker: Any, parts: dict[str, Any], message: str
) -> None:
    head = head_of("llava", maker, **parts) if isinstance(maker, str) else maker.__new__(maker)
    with pytest.raises(ValueError, match=rf"--pack 64 .*{message}.*; drop --pack"):
        check_packing(training, head, 64)


def test_what_can_be_packed_is_accepted() -> None:
    check_packing(EAGLE3, head_of("llava", "eagle3"), 64)
    check_packing(HASS, head_of("llava", "feature"), 64)
    with pytest.raises(ValueError, match="--pack"):
        check_packing(EAGLE3, head_of("llava", "eagle3"), 0)
