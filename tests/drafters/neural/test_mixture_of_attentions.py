"""Mixture of Attentions: what a slot reads in drafting and in training, and what it never reads."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.draft import Scores
from mmspec.drafters.draft_model import DraftUpdate
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.feature_head import FeatureDraft, tap_of
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.mixture_of_attentions import (
    MixtureOfAttentions,
    MixtureOfAttentionsConfig,
)
from mmspec.models.heads.state_head import SlotMarks
from mmspec.models.loading import random_model
from mmspec.targets.tokens.context import Context
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.mixture_of_attentions import mixture_loss
from tests import toys
from tests.drafters.heads import Recorder
from tests.drafters.state_heads import ROOM, along, lesson, slow, target
from tests.toys.readers import backbone

pytestmark = pytest.mark.exhaustive
SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(5)),
    "dynamic": DynamicTree(depth=4, beam=2, nodes=6),
}


class Late(Recorder):
    """Wrong: every state is that of the token before."""

    def keep(self, context: Context, state: Any, update: DraftUpdate) -> Any:
        features = {name: one.roll(1, 1) for name, one in update.scores.features.items()}
        scores: Scores = replace(update.scores, features=features)
        return self.inner.keep(context, state, replace(update, scores=scores))


@lru_cache(maxsize=4)
def head_of(family: str, **parts: Any) -> MixtureOfAttentions:
    """A head of random wide weights."""
    reader = backbone(target(family))
    parts = {"initializer_range": 0.2, **parts}
    config = MixtureOfAttentionsConfig.of(reader.config, reader.vocabulary, **parts)
    made: MixtureOfAttentions = random_model(lambda: MixtureOfAttentions(config), 0)
    return made


def compare(family: str, head: MixtureOfAttentions, shape: str, wrap: Any) -> None:
    """Distributions of a run on ragged rows, and the same from scratch."""
    recorder = wrap(FeatureDraft(backbone(target(family)), head))
    drafter = Autoregressive(recorder, SHAPES[shape])
    fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
    example = lesson(family, 3)
    out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
    assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
    words = slice(toys.WORDS.start, toys.WORDS.stop)
    for ours, theirs in slow(family, head, example, recorder.recorded[:12]):
        assert_close(ours[words], theirs[words], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "shape", "parts"),
    [
        ("llava", "chain", {}),
        ("qwen2_5_vl", "dynamic", {"positions": "mrope", "num_taps": 4}),
        ("llava", "dynamic", {"visual_slots": "hidden", "num_taps": 1}),
    ],
)
def test_a_distribution_is_that_of_a_reading_from_scratch(
    family: str, shape: str, parts: dict[str, Any]
) -> None:
    head = head_of(family, **parts)
    compare(family, head, shape, Recorder)
    with pytest.raises(AssertionError, match="not close"):
        compare(family, head, shape, Late)


@torch.no_grad()
def test_a_draft_reads_no_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with states of drafted slots the distributions are others."""
    head, states, embeds = head_of("llava"), torch.randn(1, 5, 64), torch.randn(1, 5, 64)
    marks: Any = SlotMarks(torch.tensor([[0, 0, 0, 1, 2]]))
    other = states.clone()
    other[:, 3:] = torch.randn(1, 2, 64)
    found = [head(embeds, one, marks=marks) for one in (states, other)]
    assert_close(*found)
    assert not torch.allclose(head(embeds, states), head(embeds, other), atol=1e-2)
    original = MixtureOfAttentions.prepare_inputs
    monkeypatch.setattr(
        MixtureOfAttentions,
        "prepare_inputs",
        lambda self, embeds, states, marks: original(self, embeds, states, replace(marks, steps=0)),
    )
    assert not torch.allclose(head(embeds, states, marks=marks), found[0], atol=1e-2)


@torch.no_grad()
def test_layers_attend_to_each_other() -> None:
    """The averaged state of one token: not a sum of what each layer gives; none of other tokens."""
    head = head_of("llava")
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3 * 64, generator=generator)
    fused = head.fuse(features)
    assert_close(head.fuse(features[:1]), fused[:1])
    assert head.fuse(features[:0]).shape == (0, 64)
    first, last = features.clone(), features.clone()
    first[:, :64] += 1
    last[:, -64:] += 1
    both = first + last - features
    added = head.fuse(first) + head.fuse(last) - fused
    assert not torch.allclose(head.fuse(both), added, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("pack", [None, 256])
def test_the_loss_by_hand(pack: int | None) -> None:
    """Pass i is the i-th step of a draft along the response itself; also of packed rows."""
    example, reader, head = lesson("llava", 3), backbone(target("llava")), head_of("llava")
    tokens = example.tokens.clone()
    tokens[1, 5:] = -1
    given, length = TrainingExample(example.inputs, tokens, pack=pack), tokens.shape[1]
    read = read_example(reader, replace(given, pack=None), tap_of(head, reader))
    found: list[list[Tensor]] = [[], [], []]
    for row in range(3):
        for start in range(length):
            for late in range(min(3, length - start)):
                if tokens[row, start + late] < 0:
                    continue
                path = example.tokens[row, start + 1 : start + late + 1].tolist()
                own = along(reader, head, read, row, start + 1, path)[1]
                wanted = reader.head(read.next[row, start + late])
                found[late].append(soft_cross_entropy(own[None], wanted[None]))
    expected = torch.stack([torch.stack(own).mean() for own in found]).mean()
    assert_close(mixture_loss(reader, head, given, passes=3), expected, atol=1e-3, rtol=1e-4)


def test_every_part_is_trained() -> None:
    reader, head = backbone(target("llava")), copy.deepcopy(head_of("llava")).train()
    torch.autograd.backward(mixture_loss(reader, head, lesson("llava", 3)))
    for name, weight in head.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


def test_settings_that_mean_nothing_are_refused() -> None:
    for parts, words in (
        ({"num_taps": 0}, "num_taps=0 must be"),
        ({"num_taps": 2, "tapped_layers": [1]}, "make both agree"),
        ({"num_hidden_layers": 3}, "this head has 2"),
        ({"visual_slots": "raw"}, "choose one of fused, placeholder, hidden"),
        ({"sliding_window": 4}, "no effect"),
    ):
        with pytest.raises(ValueError, match=words):
            MixtureOfAttentionsConfig(hidden_size=64, vocab_size=160, **parts)
    beyond = copy.deepcopy(head_of("llava"))
    beyond.config.tapped_layers = [1, 2, 99]
    with pytest.raises(ValueError, match="99"):
        mmspec.accelerate(target("llava"), "mixture-of-attentions", drafter=beyond)
