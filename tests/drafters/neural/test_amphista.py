"""Amphista's heads attend to each other and to their stage, and training lowers their loss."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import mmspec
from mmspec.drafters.neural.feature_head import tap_of
from mmspec.training.amphista import AMPHISTA, amphista_loss
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import train_head
from tests import toys
from tests.drafters.heads import endless
from tests.drafters.parallel_heads import ROOM, amphista_block, new_head, trained_head
from tests.drafters.state_heads import lesson, target
from tests.toys.readers import backbone

pytestmark = pytest.mark.exhaustive


@torch.no_grad()
def test_heads_attend_to_each_other_in_both_directions() -> None:
    """Any head changes with any other; without the auto-embedding block none does."""
    head = new_head("amphista", "llava")
    adapted = torch.randn(2, 2 * 64, generator=torch.Generator().manual_seed(0))
    assert changes(head, adapted) == [[True] * 4] * 4
    bare = copy.deepcopy(head)
    bare.auto_embedding = nn.Identity()
    assert changes(bare, adapted) == torch.eye(4).bool().tolist()


def changes(head: Any, adapted: Tensor) -> list[list[bool]]:
    """Whether head j (column) is another one after a change of the block of head i (row)."""
    before, found = head.predict_block(adapted), []
    for at in range(4):
        other = copy.deepcopy(head)
        other.blocks[at].linear.weight.normal_(generator=torch.Generator().manual_seed(1))
        found.append((other.predict_block(adapted) != before).flatten(2).any(-1).all(0).tolist())
    return found


@torch.no_grad()
def test_the_first_half_reads_the_first_stage() -> None:
    head = new_head("amphista", "llava")
    head.auto_embedding = nn.Identity()
    adapted = torch.randn(1, 2 * 64, generator=torch.Generator().manual_seed(0))
    before, again = head.predict_block(adapted), adapted.clone()
    again[:, 64:] += 1
    assert (head.predict_block(again) != before).any(-1)[0].tolist() == [False, False, True, True]


@torch.no_grad()
def test_the_loss_by_hand() -> None:
    """Also of rows that are packed into one sequence."""
    example, reader = lesson("llava", 3), backbone(target("llava"))
    head = new_head("amphista", "llava")
    tokens = example.tokens.clone()
    tokens[1, 4:] = -1
    given, length = TrainingExample(example.inputs, tokens), tokens.shape[1]
    read = read_example(reader, given, tap_of(head, reader))
    found: list[list[Tensor]] = [[] for _ in range(4)]
    for row in range(3):
        for start in range(length):
            block = amphista_block(reader, head, read, row, start + 1)
            for late in range(min(4, length - start)):
                if tokens[row, start + late] >= 0:
                    wanted = reader.head(read.next[row, start + late])
                    found[late].append(soft_cross_entropy(block[late : late + 1], wanted[None]))
    expected = sum(0.8**late * torch.stack(own).mean() for late, own in enumerate(found))
    for one in (given, replace(given, pack=256)):
        assert_close(amphista_loss(reader, head, one), expected, atol=1e-4, rtol=1e-4)


def test_every_part_is_trained_and_the_loss_falls() -> None:
    example, reader, seen = lesson("llava", 3), backbone(target("llava")), list[float]()
    head = new_head("amphista", "llava")
    torch.autograd.backward(amphista_loss(reader, head, example))
    for name, weight in head.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name
    train_head(AMPHISTA, reader, head, endless(example), 10, 3e-3, lambda *one: seen.append(one[3]))
    assert seen[-1] < 0.9 * seen[0]


def test_acceptance_needs_the_adaptation_stages() -> None:
    """Trained beats untrained; without the embedding of the newest token it loses most of it."""
    head = trained_head("amphista", "llava")
    blind = copy.deepcopy(head)
    with torch.no_grad():
        for stage in blind.stages:
            stage.fc.weight[:, :64].zero_()
    kept = accepted(head)
    assert kept > 2 * accepted(new_head("amphista", "llava")) + 4
    assert accepted(blind) < 0.7 * kept


def accepted(head: Any) -> int:
    given = toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(target("llava"), "amphista", drafter=head)
    stats = fast.generate(**given, max_new_tokens=ROOM, do_sample=False).stats
    return int(stats.num_accepted_draft_tokens)


def test_settings_that_mean_nothing_are_refused() -> None:
    for parts, words in (
        ({"num_heads": 0}, "num_heads=0 must be"),
        ({"num_heads": 2, "num_hidden_layers": 3}, "num_hidden_layers=3 must be"),
        ({"visual_slots": "raw"}, "choose one of fused, placeholder, hidden"),
        ({"sliding_window": 4}, "no effect"),
    ):
        with pytest.raises(ValueError, match=words):
            new_head("amphista", "llava", **parts)
    few = new_head("amphista", "llava", num_heads=2)
    with pytest.raises(ValueError, match="predicts the next 2 only; give length=2"):
        mmspec.accelerate(target("llava"), "amphista", drafter=few, length=3)
