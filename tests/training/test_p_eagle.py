"""Depths of a training run are those of drafting, and the loss is what it says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mmspec.drafters.neural.feature_head import tap_of
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.p_eagle import new_p_eagle, p_eagle_loss, run_depths, sample_depths
from tests.drafters.parallel_heads import new_head, p_eagle_block
from tests.drafters.state_heads import lesson, target
from tests.toys.readers import backbone


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llava", {"num_hidden_layers": 2}),
        ("llava", {"sliding_window": 3, "own_embeddings": True}),
        ("qwen2_5_vl", {"positions": "mrope", "visual_slots": "fused"}),
        ("qwen2_5_vl", {"positions": "compact", "visual_slots": "hidden"}),
    ],
)
def test_a_slot_reads_what_drafting_reads(family: str, parts: dict[str, Any]) -> None:
    example, reader = lesson(family, 3), backbone(target(family))
    head = new_head("p-eagle", family, **parts)
    read = read_example(reader, example, tap_of(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), example.tokens.shape[1]
    starts, depths = sample_depths(length, 4, 0.9, 0.5)
    states = run_depths(reader, head, prompt, length, starts, depths)
    logits = head.expand_logits(head.logits(states, reader.head))
    for row in range(3):
        for start in {0, 3, *starts[depths == 3].tolist()}:
            expected = p_eagle_block(reader, head, read, row, start + 1)
            for place in (starts == start).nonzero()[:, 0].tolist():
                found, own = logits[row, place], expected[int(depths[place])]
                assert_close(found, own, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_loss_by_hand() -> None:
    """All slots of all depths; nothing after the end of a row, nothing of other words."""
    example, reader = lesson("llava", 3), backbone(target("llava"))
    head = new_head("p-eagle", "llava", draft_vocab_size=100)
    tokens = example.tokens.clone()
    tokens[1, 4:] = -1
    given, length = TrainingExample(example.inputs, tokens), tokens.shape[1]
    read = read_example(reader, given, tap_of(head, reader))
    found = []
    for row in range(3):
        for start in range(length):
            block = p_eagle_block(reader, head, read, row, start + 1)[:, head.token_ids]
            for depth in range(min(4, length - start)):
                wanted = reader.head(read.next[row, start + depth])
                if tokens[row, start + depth] < 0 or not bool(head.t2d[wanted.argmax()]):
                    continue
                found.append(soft_cross_entropy(block[depth : depth + 1], wanted[head.token_ids]))
    assert len(found) > 3 * length
    loss = p_eagle_loss(reader, head, given, keep=1.0)
    assert_close(loss, torch.stack(found).mean(), atol=1e-4, rtol=1e-4)


def test_every_part_is_trained() -> None:
    example, reader = lesson("llava", 3), backbone(target("llava"))
    head = new_head("p-eagle", "llava", own_embeddings=True, num_hidden_layers=2)
    torch.autograd.backward(p_eagle_loss(reader, head, example))
    for name, weight in head.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


def test_deeper_slots_are_fewer_and_continue_shallower_ones() -> None:
    starts, depths = sample_depths(100, 6, 0.7, 0.2)
    assert starts[depths == 0].tolist() == list(range(100))
    shares = [int((depths == depth).sum()) for depth in range(6)]
    assert all(more >= less for more, less in pairwise(shares))
    assert shares[1] <= 70
    assert shares[5] <= 20
    for depth in range(2, 6):
        deeper = set(starts[depths == depth].tolist())
        assert deeper <= set(starts[depths == depth - 1].tolist())
    assert int((starts + depths).max()) < 100


def test_new_heads_mask_a_token_that_is_not_used() -> None:
    reader = backbone(target("llava"))
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    counts[[3, 7]] = 0
    head = new_p_eagle(reader, counts, own_embeddings=True, draft_vocab_size=20)
    assert head.config.mask_token_id == 7
    assert head.config.visual_slots == "placeholder"
    table = reader.embed(torch.arange(reader.vocabulary)[None])[0]
    assert head.embeddings is not None
    assert_close(head.embeddings(torch.arange(reader.vocabulary)), table)
