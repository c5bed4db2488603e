"""Training on self-fed states reads what drafting reads, and losses are what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mmspec.drafters.neural.feature_head import tap_of
from mmspec.drafters.neural.head_prompt import head_prompt
from mmspec.training import losses, self_fed
from mmspec.training.heads import EAGLE, TrainingExample, read_example
from mmspec.training.self_fed import (
    EAGLE3,
    HASS,
    aligned_loss,
    eagle3_loss,
    new_eagle3,
    unroll_passes,
)
from mmspec.training.trainable import HeadTraining, train_head
from mmspec.training.vispec import VISPEC, text_loss, vispec_loss
from tests.covering import limited
from tests.drafters.heads import endless
from tests.drafters.state_heads import along, head_of, lesson, target
from tests.toys.readers import backbone

PASSES = 3


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "maker", "parts"),
    limited(
        [
            ("llava", "eagle3", {}),
            ("qwen2_5_vl", "eagle3", {"positions": "mrope", "num_steps": 2}),
            (
                "qwen2_5_vl",
                "feature",
                {"visual_slots": "hidden", "positions": "compact", "num_steps": 2},
            ),
            ("gemma3", "feature", {"num_hidden_layers": 2}),
            ("llava", "eagle3", {"norm_output": True, "sliding_window": 3}),
            ("llava", "feature", {"visual_slots": "compressed", "num_q": 2}),
        ],
        3,
    ),
)
def test_a_pass_reads_what_drafting_reads(family: str, maker: str, parts: dict[str, Any]) -> None:
    """Slot t of pass i: true states of slots 0..t, then i self-fed steps with the true tokens."""
    example, reader = lesson(family, 3), backbone(target(family))
    head = head_of(family, maker, **parts)
    read = read_example(reader, example, tap_of(head, reader))
    prompt, last = head_prompt(head, reader, read.prompt), example.tokens.shape[1]
    own = list(unroll_passes(head, prompt, last, PASSES))
    wrong = list(unroll_passes(head, replace(prompt, positions=0 * prompt.positions), last, PASSES))
    for again, states in enumerate(own):
        for row in range(3):
            for t in (0, 2, last - 1 - again):
                path = example.tokens[row, t + 1 : t + 1 + again].tolist()
                expected, _ = along(reader, head, read, row, t + 1, path)
                assert_close(states[row, t], expected, atol=1e-4, rtol=1e-4)
                assert not torch.allclose(wrong[again][row, t], expected, atol=1e-4)
    assert not torch.allclose(own[1][:, 1:], own[0][:, 1:], atol=1e-2)  # passes differ


@torch.no_grad()
def test_the_loss_of_eagle_3_by_hand() -> None:
    """Pass by pass, place by place; nothing behind the end of a row, nothing of other words."""
    example, reader = lesson("llava", 3), backbone(target("llava"))
    head = head_of("llava", "eagle3", draft_vocab_size=100)
    tokens = example.tokens.clone()
    tokens[1, 4:] = -1
    read = read_example(reader, TrainingExample(example.inputs, tokens), tap_of(head, reader))
    prompt, length = head_prompt(head, reader, read.prompt), tokens.shape[1]
    expected, taught = torch.zeros(()), 0
    for late, own in enumerate(unroll_passes(head, prompt, length, PASSES)):
        found = []
        for row in range(3):
            for t in range(length - late):
                logits = reader.head(read.next[row, t + late])
                if tokens[row, t + late] < 0 or not bool(head.t2d[logits.argmax()]):
                    continue
                distribution = logits[head.token_ids].softmax(-1)
                said = head.lm_head(head.norm(own[row, t])).log_softmax(-1)
                found.append(-(distribution * said).sum())
        taught += len(found)
        expected = expected + 0.5**late * torch.stack(found).mean()
    assert 0 < taught < 3 * PASSES * length - 18
    loss = eagle3_loss(reader, head, TrainingExample(example.inputs, tokens), PASSES, 0.5)
    assert_close(loss, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_one_pass_of_hass_is_eagles_loss_and_the_likeliest_tokens() -> None:
    example, reader, head = lesson("llava", 3), backbone(target("llava")), head_of("llava")
    read = read_example(reader, example, "hidden")
    prompt, length = head_prompt(head, reader, read.prompt), example.tokens.shape[1]
    own = next(unroll_passes(head, prompt, length, 1)).flatten(0, 1)
    said, wanted = (reader.head(states) for states in (own, read.next.flatten(0, 1)))
    regression = torch.nn.functional.smooth_l1_loss(own, read.next.flatten(0, 1))
    expected = regression + 0.1 * losses.soft_cross_entropy(said, wanted)
    plain = aligned_loss(reader, head, example, 1, noise=0.0, top_weight=0.0)
    assert_close(plain, expected, atol=1e-4, rtol=1e-4)
    more = aligned_loss(reader, head, example, 1, noise=0.0)
    top = losses.top_cross_entropy(said, wanted, 10)
    assert_close(more, expected + top, atol=1e-4, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("training", "maker", "parts", "rate"),
    [
        (EAGLE3, "eagle3", {"draft_vocab_size": 130}, 1e-3),
        (HASS, "feature", {}, 1e-3),
        (VISPEC, "feature", {"visual_slots": "compressed", "num_q": 2}, 1e-3),
        (EAGLE, "feature", {"visual_slots": "raw"}, 1e-3),
    ],
    ids=["eagle3", "hass", "vispec", "msd"],
)
def test_learning_lowers_the_loss(
    training: HeadTraining, maker: str, parts: dict[str, Any], rate: float
) -> None:
    example, reader, seen = lesson("llava", 3), backbone(target("llava")), list[float]()
    before = {name: one.clone() for name, one in target("llava").state_dict().items()}
    head = head_of("llava", maker, **parts)
    train_head(
        training, reader, head, endless(example), 10, rate, lambda *said: seen.append(said[3])
    )
    assert seen[-1] < 0.95 * seen[0]
    assert not head.training
    assert all(torch.equal(one, before[name]) for name, one in reader.model.state_dict().items())


def test_every_part_of_a_head_is_trained() -> None:
    example, reader = lesson("llava", 3), backbone(target("llava"))
    for loss, maker, parts in (
        (vispec_loss, "feature", {"visual_slots": "compressed", "num_q": 2}),
        (text_loss, "feature", {"visual_slots": "compressed", "num_latents": 2}),
        (aligned_loss, "feature", {"visual_slots": "hidden", "num_steps": 2}),
        (eagle3_loss, "eagle3", {"num_steps": 2}),
    ):
        head = head_of("llava", maker, **parts)
        torch.autograd.backward(loss(reader, head, example))
        for name, weight in head.named_parameters():
            assert weight.grad is not None, name
            assert bool(weight.grad.any()), name


def test_a_head_with_own_states_is_not_trained_on_the_targets() -> None:
    with pytest.raises(ValueError, match="cannot be trained on them"):
        train_head(EAGLE, backbone(target("llava")), head_of("llava", "eagle3"), iter(()), 1)


def test_a_vocabulary_is_chosen_by_what_is_said() -> None:
    """The most frequent ids, ascending; ties go to the smaller one."""
    reader = backbone(target("llava"))
    counts = torch.zeros(reader.vocabulary, dtype=torch.int64)
    counts[[90, 12, 40]] = torch.tensor([5, 9, 5])
    head = new_eagle3(reader, counts, draft_vocab_size=5)
    assert head.token_ids.tolist() == [0, 1, 12, 40, 90]
    assert head.d2t.tolist() == [0, 0, 10, 37, 86]
    assert head.t2d.nonzero()[:, 0].tolist() == [0, 1, 12, 40, 90]
    whole = EAGLE3.begin(reader, counts)
    assert "d2t" not in whole.state_dict()
    for size in (0, reader.vocabulary + 1, "all"):
        with pytest.raises(ValueError, match=f"draft_vocab_size={size!r} must be a whole number"):
            new_eagle3(reader, counts, draft_vocab_size=size)


def test_a_large_vocabulary_is_cut_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = backbone(target("llava"))
    monkeypatch.setattr(self_fed, "DRAFT_VOCABULARY", 7)
    counts = torch.arange(reader.vocabulary)
    assert new_eagle3(reader, counts).token_ids.tolist() == list(range(reader.vocabulary))[-7:]
    assert not new_eagle3(reader, counts, draft_vocab_size=None).has_draft_vocabulary


@pytest.mark.parametrize(
    ("family", "usual"), [("llava", "keep"), ("qwen2_5_vl", "mrope"), ("qwen3_vl", "mrope")]
)
def test_positions_are_by_default_those_that_engines_give(family: str, usual: str) -> None:
    reader = backbone(target(family))
    counts = torch.zeros(reader.vocabulary, dtype=torch.int64)
    own = new_eagle3(reader, counts).config
    assert own.positions == usual
    assert bool((own.rope_parameters or {}).get("mrope_section")) == (usual == "mrope")
    assert new_eagle3(reader, counts, positions="keep").config.positions == "keep"
