"""Action slots: exact with any weights, one pass per output, and their training."""

from __future__ import annotations

from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.drafters.neural.action_slots import ACTION_SLOTS
from mmspec.modalities.common.families import make_reader
from mmspec.models.heads.action_slots import ActionSlots, count_slots
from mmspec.training.action_slots import ACTION_SLOTS_TRAINING, new_slots, slots_loss
from mmspec.training.heads import TrainingExample
from mmspec.training.trainable import train_head
from mmspec.trees import Tree
from tests.covering import covering
from tests.toys import prismatic as toys
from tests.toys.prismatic import BOS, SIDE, WORDS

SIZE = 7
PADS = {"one": (0,), "ragged": (0, 3, 1)}
SETTINGS: dict[str, Any] = {"max_new_tokens": SIZE, "do_sample": False}


@cache
def policy() -> Any:
    return toys.openvla()


@cache
def request(batch: str) -> tuple[dict[str, Tensor], Tensor]:
    pads, generator = PADS[batch], torch.Generator().manual_seed(5)
    ids = torch.randint(3, WORDS, (len(pads), 6), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad], ids[row, pad] = WORDS, 0, BOS
    pixels = torch.randn(len(pads), 6, SIDE, SIDE, generator=generator)
    given = policy().add_image_ids(
        {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    )
    return given, policy().generate(**given, **SETTINGS)


def slots(seed: int = 0) -> ActionSlots:
    head: ActionSlots = ACTION_SLOTS.random(make_reader(policy()), seed)
    assert head.config.num_slots == SIZE
    return head


@cache
def trained() -> ActionSlots:
    """Slots overfitted to one request."""
    target = make_reader(policy())
    torch.manual_seed(1)
    head = new_slots(target, torch.zeros(target.vocabulary))
    given, answer = request("one")
    rows = {name: torch.cat([value] * 4) for name, value in given.items()}
    lesson = TrainingExample(rows, answer[:, -SIZE:].expand(4, -1))
    train_head(ACTION_SLOTS_TRAINING, target, head, repeat(lesson), 40, 1e-2)
    return head


@pytest.mark.parametrize(
    ("shape", "batch", "kind"),
    covering(
        [{}, {"length": 2}, {"tree": Tree.branching([2, 2, 1])}],
        PADS,
        ["random", "trained"],
        strength=1,
    ),
)
def test_tokens_are_those_of_the_policy(kind: str, batch: str, shape: dict[str, Any]) -> None:
    given, expected = request(batch)
    head = slots() if kind == "random" else trained()
    out = mmspec.accelerate(policy(), "oft-draft", drafter=head, **shape).generate(
        **given, **SETTINGS
    )
    assert torch.equal(out.sequences, expected)


def test_an_answer_known_by_heart_takes_one_forward() -> None:
    """The first token comes with the prompt, the last one with the draft between."""
    given, _ = request("one")
    calls = {}
    for name, head in (("trained", trained()), ("random", slots())):
        out = mmspec.accelerate(policy(), "oft-draft", drafter=head).generate(**given, **SETTINGS)
        calls[name] = out.stats.target_calls
        assert out.stats.num_accepted_draft_tokens + calls[name] == SIZE - 1
    assert calls["trained"] == 1 < calls["random"]


def test_sampled_tokens_are_those_of_plain_decoding() -> None:
    given, _ = request("ragged")
    settings: Any = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.0, "seed": 4}
    plain = mmspec.decode_plain(policy(), **given, **settings).sequences
    fast = mmspec.accelerate(policy(), "oft-draft", drafter=trained())
    assert torch.equal(fast.generate(**given, **settings).sequences, plain)


def test_every_place_reads_all_of_the_prompt_and_the_tokens_that_are_known() -> None:
    """Nothing hidden matters: neither padding, nor a token in an open slot."""
    head, generator = slots(), torch.Generator().manual_seed(2)
    width = head.config.hidden_size
    states = torch.randn(1, 5, width, generator=generator)
    embeds = torch.randn(1, SIZE, width, generator=generator)
    known = torch.arange(SIZE)[None] < 2
    seen = torch.tensor([[False, True, True, True, True]])

    def predict(states: Tensor = states, embeds: Tensor = embeds) -> Tensor:
        with torch.no_grad():
            out: Tensor = head(states, embeds, known, seen)
        return out

    def perturb(value: Tensor, place: int) -> Tensor:
        other = value.clone()
        other[:, place] += 1.0
        return other

    assert torch.equal(predict(perturb(states, 0)), predict())
    assert torch.equal(predict(embeds=perturb(embeds, 4)), predict())
    for other in (predict(perturb(states, 1)), predict(embeds=perturb(embeds, 1))):
        assert bool(((other - predict()).abs().amax(-1) > 1e-6).all())
    short = torch.ones(1, 4, dtype=torch.bool)
    with torch.no_grad():
        alone = head(states[:, 1:], embeds, known, short)
    torch.testing.assert_close(alone, predict(), atol=1e-5, rtol=1e-4)


def test_the_loss_asks_for_open_slots_alone() -> None:
    """An output that ended early gives no training signal after its end."""
    target, (given, answer) = make_reader(policy()), request("one")
    tokens = answer[:, -SIZE:].clone()
    torch.manual_seed(0)
    whole = slots_loss(target, slots(), TrainingExample(given, tokens))
    tokens[:, 1:] = -1
    nothing = slots_loss(target, slots(), TrainingExample(given, tokens))
    assert whole > 0 == nothing


def test_saved_slots_come_back(tmp_path: Path) -> None:
    trained().save_pretrained(tmp_path)
    again = ACTION_SLOTS.load(tmp_path, make_reader(policy()))
    for ours, theirs in zip(again.parameters(), trained().parameters(), strict=True):
        assert torch.equal(ours, theirs)
    given, expected = request("one")
    fast = mmspec.accelerate(policy(), "oft-draft", drafter=tmp_path)
    out = fast.generate(**given, **SETTINGS)
    assert torch.equal(out.sequences, expected)
    assert out.stats.target_calls == 1


def test_slots_of_another_target_are_refused() -> None:
    other = toys.openvla(text_config=toys.text_config(hidden_size=32))
    with pytest.raises(ValueError, match="states 64 wide"):
        mmspec.accelerate(other, "oft-draft", drafter=slots())
    with pytest.raises(ValueError, match="sees='pixels' does not fit"):
        mmspec.accelerate(policy(), "oft-draft", drafter=slots(), sees="pixels")


def test_there_are_as_many_as_the_longest_answer_has_tokens() -> None:
    four = {"action": {"q01": [0.0] * 4, "q99": [1.0] * 4}}
    config = toys.openvla_config(norm_stats={"arm": four, "toy": {"action": toys.SPAN}})
    assert count_slots(config) == SIZE
    assert count_slots(toys.openvla_config(norm_stats={"arm": four}, num_actions_chunk=3)) == 12


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"num_slots": 0}, "num_slots=0"), ({"num_steps": 2}, "has no effect")],
)
def test_configurations_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    target = make_reader(policy())
    with pytest.raises(ValueError, match=says):
        new_slots(target, torch.zeros(target.vocabulary), **changes)
