"""Blocks of a training pass are those of drafting, and the loss is what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mmspec.drafters.neural.dflash import context_slots
from mmspec.drafters.neural.feature_head import tap_of
from mmspec.models.heads.dflash import uniform_layers
from mmspec.training.dflash import (
    block_gamma,
    dflash_loss,
    new_dflash,
    run_blocks,
    sample_anchors,
)
from mmspec.training.heads import TrainingExample, read_example
from tests.drafters.parallel_heads import dflash_block, new_head
from tests.drafters.state_heads import lesson, target
from tests.toys.readers import backbone


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llava", {}),
        ("llava", {"visual_slots": "hidden"}),
        ("qwen2_5_vl", {"positions": "mrope"}),
    ],
)
def test_a_block_reads_what_drafting_reads(family: str, parts: dict[str, Any]) -> None:
    example, reader = lesson(family, 3), backbone(target(family))
    head = new_head("dflash", family, **parts)
    read = read_example(reader, example, tap_of(head, reader))
    anchors = torch.tensor([[0, 2, 5], [1, 2, 3], [0, 4, 8]])
    context = context_slots(head, reader, read.prompt)
    states = run_blocks(reader, head, context, example.tokens, anchors)[:, :, 1:]
    for row in range(3):
        for block, at in enumerate(anchors[row].tolist()):
            expected = dflash_block(reader, head, read, row, at + 1)
            assert_close(reader.head(states[row, block]), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(states[0, 0], states[0, 1], atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("cut", [None, 100])
def test_the_loss_by_hand(cut: int | None) -> None:
    """Block by block; nothing after the end of a row, nothing outside of the vocabulary."""
    example, reader = lesson("llava", 3), backbone(target("llava"))
    head = new_head("dflash", "llava", draft_vocab_size=cut)
    tokens = example.tokens.clone()
    tokens[1, 4:] = -1
    read = read_example(reader, TrainingExample(example.inputs, tokens), tap_of(head, reader))
    total, weights, length = torch.zeros(()), torch.zeros(()), tokens.shape[1]
    for row in range(3):
        for at in range(length - 1):
            logits = dflash_block(reader, head, read, row, at + 1).log_softmax(-1)
            for step in range(min(head.reach, length - 1 - at)):
                label = int(tokens[row, at + 1 + step])
                if label < 0 or (cut is not None and not bool(head.t2d[label])):
                    continue
                weight = torch.exp(torch.tensor(-step / block_gamma(head.config.block_size)))
                total, weights = total - weight * logits[step, label], weights + weight
    loss = dflash_loss(reader, head, TrainingExample(example.inputs, tokens))
    assert_close(loss, total / weights, atol=1e-4, rtol=1e-4)
    nothing = TrainingExample(example.inputs, tokens[:, :1])
    assert float(dflash_loss(reader, head, nothing)) == 0


def test_every_part_is_trained() -> None:
    example, reader = lesson("llava", 3), backbone(target("llava"))
    head = new_head("dflash", "llava", draft_vocab_size=100)
    torch.autograd.backward(dflash_loss(reader, head, example))
    for name, weight in head.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


def test_anchors_are_different_real_tokens_with_a_successor() -> None:
    is_real = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    found = sample_anchors(is_real, 2)
    assert found.shape == (2, 2)
    assert found[1].tolist() == [0, 1]
    assert set(sample_anchors(is_real, 99)[0].tolist()) == {0, 1, 2, 3, 4}
    assert [block_gamma(size) for size in (8, 10, 16)] == [4, 5, 7]  # of the paper


def test_new_heads_have_the_published_layers_and_the_output_head_of_the_target() -> None:
    reader = backbone(target("llava"))
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    head = new_dflash(reader, counts)
    assert head.config.tapped_layers == list(uniform_layers(len(reader.layers), 5))
    assert head.config.mask_token_id == reader.vocabulary - 1
    assert head.lm_head is None
    with pytest.raises(ValueError, match="draft_vocab_size=0"):
        new_dflash(reader, counts, draft_vocab_size=0)
