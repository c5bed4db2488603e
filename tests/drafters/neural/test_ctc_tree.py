"""CTC-drafter: which texts are drafted, from what, and what its loss asks for."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.codes.ctc import search_prefixes
from mmspec.draft import Draft, Scores
from mmspec.drafters.neural.ctc_tree import CtcSlots, CtcTree
from mmspec.drafters.neural.feature_head import tap_of
from mmspec.models.heads.ctc_head import CtcHead, CtcHeadConfig
from mmspec.models.loading import random_model
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context
from mmspec.training.ctc_drafter import CTC, ctc_loss
from mmspec.training.heads import TargetOutputs, TrainingExample, read_example
from mmspec.training.trainable import train_head
from tests import toys
from tests.drafters.heads import endless
from tests.drafters.state_heads import ROOM, lesson, target, true_slots
from tests.toys.readers import backbone

pytestmark = pytest.mark.exhaustive


def new_head(family: str, **parts: Any) -> CtcHead:
    """A head of random wide weights; its blocks differ."""
    reader = backbone(target(family))
    parts = {"num_slots": 4, "num_labels": 3, "initializer_range": 0.2, **parts}
    config = CtcHeadConfig.of(reader.config, reader.vocabulary, **parts)
    made: CtcHead = random_model(lambda: CtcHead(config), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in made.blocks:
            weight: Any = block.linear.weight  # type: ignore[union-attr]
            weight.normal_(0.0, 0.3, generator=generator)
    return made


@lru_cache(maxsize=1)
def trained_head() -> CtcHead:
    """A head overfitted to the answers of three ragged rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = CTC.begin(backbone(target("llava")), torch.zeros(0), num_slots=6, num_labels=3)
        train_head(CTC, backbone(target("llava")), head, endless(lesson("llava", 3)), 40, 1e-2)
    assert isinstance(head, CtcHead)
    return head


@dataclass(frozen=True, eq=False)
class Recorded(CtcTree):
    """Records the drafts, and the committed tokens before them."""

    drafts: list[tuple[tuple[int, ...], Draft]] = field(default_factory=list)
    late: bool = False

    def propose(self, context: Context, state: Any) -> Draft:
        self.drafts.append((context.lengths, super().propose(context, state)))
        return self.drafts[-1][1]

    def observe(self, context: Context, state: Any, draft: Draft, scores: Scores, one: Any) -> Any:
        if self.late:  # wrong: every state is that of the token before
            features = {name: own.roll(1, 1) for name, own in scores.features.items()}
            scores = replace(scores, features=features)
        return super().observe(context, state, draft, scores, one)


@torch.no_grad()
def slot_probs(
    reader: Reader, head: CtcHead, read: TargetOutputs, row: int, new: int
) -> Tensor:  # (K, V + 1)
    """Probabilities after `new` tokens of a row, from scratch."""
    slots, _ = true_slots(reader, head, read, row, new)
    embeds = torch.stack([one[0] for one in slots])[None]
    states = torch.stack([one[1] for one in slots])[None]
    places = torch.stack([torch.as_tensor(one[4]) for one in slots], -1)[..., None, :]
    hidden = head(embeds, states, None, places)[0, -1]
    return head.logits(head.predict_slots(hidden), reader.head).softmax(-1)


def texts_of(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """The texts of all nodes of a row."""
    found: list[tuple[int, ...]] = []
    nodes = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)
    for token, parent in nodes:
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return {text for text, real in zip(found, draft.mask[row].tolist(), strict=True) if real}


def compare(family: str, head: CtcHead, is_late: bool) -> None:
    reader, example = backbone(target(family)), lesson(family, 3)
    drafter = Recorded(CtcSlots(reader, head), 12, 6, 5, late=is_late)
    fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
    out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
    read = read_example(reader, example, tap_of(head, reader))
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    for lengths, draft in drafter.drafts:
        room = ROOM - min(length - prompt for length, prompt in zip(lengths, prompts, strict=True))
        for row, length in enumerate(lengths):
            new = length - prompts[row]
            if new >= ROOM:
                continue
            probs = slot_probs(reader, head, read, row, new)
            best = probs[:, :-1].topk(5)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            slots = [dict(zip(*pair, strict=True)) for pair in pairs]
            texts = search_prefixes(slots, probs[:, -1].tolist(), 6)
            expected = set[tuple[int, ...]]()
            for text, _ in texts:
                for stop in range(1, min(len(text), room - 1) + 1):
                    if len(expected) < 12:
                        expected.add(text[:stop])
            assert texts_of(draft, row) == expected


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llava", {}),
        ("qwen2_5_vl", {"positions": "mrope"}),
        ("llava", {"visual_slots": "hidden", "num_hidden_layers": 2}),
    ],
)
def test_a_tree_is_that_of_slots_read_from_scratch(family: str, parts: dict[str, Any]) -> None:
    """On ragged rows; states that are late by one token are detected."""
    head = new_head(family, **parts)
    compare(family, head, False)
    with pytest.raises(AssertionError):
        compare(family, head, True)


@torch.no_grad()
def test_the_loss_is_the_probability_of_the_following_text() -> None:
    """The sum over all paths; less at the end of a row, and no text that does not fit."""
    example, reader, head = lesson("llava", 3), backbone(target("llava")), new_head("llava")
    tokens = example.tokens.clone()
    tokens[1, 5:] = -1
    tokens[2, 2:5] = 9  # with blanks between them these need five slots
    given = TrainingExample(example.inputs, tokens)
    read, found = read_example(reader, given, tap_of(head, reader)), []
    for row in range(3):
        for start in range(ROOM - 1):
            text = [one for one in tokens[row, start + 1 : start + 4].tolist() if one >= 0]
            if not text:
                continue
            probs = slot_probs(reader, head, read, row, start + 1)
            slots = [{label: float(slot[label]) for label in set(text)} for slot in probs]
            prob = dict(search_prefixes(slots, probs[:, -1].tolist(), 10_000)).get(tuple(text), 0.0)
            found.append(-math.log(prob) if prob else 0.0)
    assert 0.0 in found
    expected = torch.tensor(sum(found) / len(found))
    assert_close(ctc_loss(reader, head, given), expected, atol=2e-3, rtol=1e-4)


def test_acceptance_needs_training_and_blanks() -> None:
    """Slots whose labels are all blank draft nothing, and neither do those of a finished row."""
    head = trained_head()
    assert accepted(head) > accepted(new_head("llava")) + 6
    silent = copy.deepcopy(head)
    with torch.no_grad():
        silent.blank.bias.fill_(1e4)
    assert accepted(silent) == 0


def accepted(head: CtcHead) -> int:
    given = toys.inputs("llava", batch=3, ragged=True)
    fast = mmspec.accelerate(target("llava"), "ctc-drafter", drafter=head)
    stats = fast.generate(**given, max_new_tokens=ROOM, do_sample=False).stats
    return int(stats.num_accepted_draft_tokens)


def test_every_part_is_trained() -> None:
    reader, head = backbone(target("llava")), new_head("llava").train()
    torch.autograd.backward(ctc_loss(reader, head, lesson("llava", 3)))
    for name, weight in head.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


def test_other_shapes_and_settings_are_refused() -> None:
    for parts, words in (
        ({"num_slots": 0}, "num_slots=0 must be"),
        ({"num_slots": 2, "num_labels": 3}, "num_labels=3 must be"),
        ({"visual_slots": "raw"}, "choose one of fused, placeholder, hidden"),
        ({"sliding_window": 4}, "no effect"),
    ):
        with pytest.raises(ValueError, match=words):
            new_head("llava", **parts)
    head = new_head("llava")
    for how, words in (
        ({"length": 3}, "do not give length= or tree="),
        ({"beam": 0}, "beam=0 must be"),
        ({"width": "many"}, "width='many' must be"),
        ({"nodes": 0}, "nodes=0 must be"),
    ):
        with pytest.raises(ValueError, match=words):
            mmspec.accelerate(target("llava"), "ctc-drafter", drafter=head, **how)
