"""OWL's LSTM continues along every path of a draft, and reads no more than one state."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.owl import OwlDraft
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.shapes import Chain, Shape
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.models.heads.owl import OwlHead, OwlHeadConfig
from mmspec.models.loading import random_model
from mmspec.training.heads import TrainingExample, read_example
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.owl import OWL, new_owl, owl_loss
from mmspec.training.trainable import train_head
from tests import toys
from tests.drafters.heads import Late, RecordedDistribution, Recorder, endless, paths
from tests.drafters.state_heads import ROOM, lesson, target
from tests.toys.readers import backbone

pytestmark = pytest.mark.exhaustive
SHAPES: dict[str, Shape] = {
    "chain": Chain(Fixed(7)),
    "dynamic": DynamicTree(depth=4, beam=2, nodes=6),
}


@lru_cache(maxsize=4)
def owl(family: str, **parts: Any) -> OwlHead:
    """A head of random wide weights, with two layers of another width."""
    reader = backbone(target(family))
    parts = {"num_layers": 2, "lstm_size": 24, "initializer_range": 0.3, **parts}
    config = OwlHeadConfig.of(reader.config, reader.vocabulary, **parts)
    made: OwlHead = random_model(lambda: OwlHead(config), 0)
    return made


def along(head: OwlHead, state: Tensor, embeds: Tensor) -> Tensor:  # (D,), (n, D) -> (D,)
    """The head's state after some tokens, in one run."""
    states: Tensor = head(embeds[None], head.begin(state[None]))[0]
    return states[0, -1]


@pytest.mark.parametrize(("family", "shape"), [("llava", "chain"), ("qwen2_5_vl", "dynamic")])
def test_a_distribution_is_that_of_one_run_along_its_path(family: str, shape: str) -> None:
    """On ragged rows; states that are late by one token are detected."""
    example, head = lesson(family, 3), owl(family)
    for wrap, is_right in ((Recorder, True), (Late, False)):
        recorder: Any = wrap(OwlDraft(backbone(target(family)), head))  # type: ignore[arg-type]
        drafter = Autoregressive(recorder, SHAPES[shape])
        fast = mmspec.accelerate(target(family), "coupled", drafter=drafter)
        out = fast.generate(**example.inputs, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(out.sequences[:, -ROOM:], example.tokens)
        recorded = recorder.recorded[:20]
        if is_right:
            agree(family, head, example, recorded)
            continue
        with pytest.raises(AssertionError, match="not close"):
            agree(family, head, example, recorded)


@torch.no_grad()
def agree(
    family: str, head: OwlHead, example: TrainingExample, recorded: list[RecordedDistribution]
) -> None:
    reader = backbone(target(family))
    read = read_example(reader, example, "hidden")
    prompts = example.inputs["attention_mask"].sum(-1).tolist()
    words, nodes = slice(toys.WORDS.start, toys.WORDS.stop), list[Any]()
    for one in recorded:
        nodes = [] if one.nodes is None else [*nodes, one.nodes]
        for row, length in enumerate(one.lengths):
            new = length - prompts[row]
            if new >= example.tokens.shape[1]:
                continue
            state = read.prompt.features[row, -example.tokens.shape[1] + new - 2]
            for place, path in paths(nodes, row):
                tokens = torch.tensor([int(example.tokens[row, new - 1]), *path])
                logits = reader.head(along(head, state, reader.embed(tokens[None])[0]))
                ours = one.distribution.scores[row, place]
                assert_close(ours[words], logits[words], atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_the_loss_by_hand() -> None:
    example, reader, head = lesson("llava", 3), backbone(target("llava")), owl("llava")
    tokens = example.tokens.clone()
    tokens[1, 5:] = -1
    given, length = TrainingExample(example.inputs, tokens), tokens.shape[1]
    read = read_example(reader, given, "hidden")
    expected = torch.zeros(())
    for step in range(3):
        found = []
        for row in range(3):
            for t in range(length - step):
                if tokens[row, t + step] >= 0:
                    state = read.prompt.features[row, -length - 1 + t]
                    embeds = reader.embed(tokens[row : row + 1, t : t + step + 1])[0]
                    own = reader.head(along(head, state, embeds))
                    wanted = reader.head(read.next[row, t + step])
                    found.append(soft_cross_entropy(own[None], wanted[None]))
        expected = expected + 0.9**step * torch.stack(found).mean()
    assert_close(owl_loss(reader, head, given, steps=3), expected, atol=1e-3, rtol=1e-4)


def test_training_approaches_the_targets_distributions() -> None:
    """At the default rate; the state of token t, added to the output, predicts token t + 1."""
    example, reader = lesson("llava", 3), backbone(target("llava"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = new_owl(reader, torch.zeros(0))
    with torch.no_grad():
        wanted = reader.head(read_example(reader, example, "hidden").next).flatten(0, 1)
        least = soft_cross_entropy(wanted, wanted)  # of one step
        first = owl_loss(reader, head, example, steps=1) - least
    train_head(OWL, reader, head, endless(example), steps=20)
    with torch.no_grad():
        last = owl_loss(reader, head, example, steps=1) - least
    assert 0 < last < 0.3 * first


def test_settings_that_mean_nothing_are_refused() -> None:
    made: Any = OwlHeadConfig
    for parts, words in (
        ({"num_layers": 0}, "num_layers=0 must be"),
        ({"lstm_size": -1}, "lstm_size=-1 must be"),
    ):
        with pytest.raises(ValueError, match=words):
            made(**parts)
    other = OwlHead(OwlHeadConfig(hidden_size=32, vocab_size=160))
    with pytest.raises(ValueError, match="states 32 wide over 160 tokens"):
        mmspec.accelerate(target("llava"), "owl", drafter=other)
