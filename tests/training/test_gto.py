"""GTO: the reward is the expected accepted length, and the loss moves paths by their advantage."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import mmspec
from mmspec import recipes
from mmspec.cli.training_examples import initial_head
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.feature_head import tap_of
from mmspec.drafters.trees.dynamic_tree import DynamicTree
from mmspec.training.feature_size import required_features
from mmspec.training.gto import (
    GTO,
    ReferencedHead,
    accepted_length,
    clipped_surrogate,
    group_loss,
    grow_group,
    path_likelihood,
    standardise,
    surrogate_loss,
    tree_reward,
)
from mmspec.training.head_trainer import HeadTrainer, TrainingSettings
from mmspec.training.heads import read_example
from tests.drafters.heads import overfit_head
from tests.drafters.state_heads import along, head_of, lesson, target
from tests.toys.readers import backbone

SMALL = DynamicTree(depth=3, beam=3, nodes=8, kinds=(Kind.DET,))
PARENTS = [[-1, -1, 0, 0, 2], [-1, 0, 1, -1, 3]]
TOKENS = [[0, 1, 0, 1, 2], [2, 1, 0, 0, 2]]


def draft_of() -> Draft:
    mask = torch.ones(2, 5, dtype=torch.bool)
    return Draft(torch.tensor(TOKENS), torch.tensor(PARENTS), mask, Kind.DET, max_depth=3)


def test_the_reward_is_the_expected_accepted_length() -> None:
    """Over all texts that the target may write after each context, by enumeration."""
    draft = draft_of()
    p = torch.rand(2, 6, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    expected = torch.zeros(2)
    for row, text in itertools.product(range(2), itertools.product(range(3), repeat=3)):
        probability, length = torch.tensor(1.0), 0
        at: int | None = -1
        for token in text:
            probability = probability * (p[row, at + 1, token] if at is not None else 1 / 3)
            if at is None:  # the tree has been left: any token
                continue
            edges = zip(PARENTS[row], TOKENS[row], strict=True)
            at = next((n for n, one in enumerate(edges) if one == (at, token)), None)
            length += at is not None
        expected[row] += probability * length
    assert_close(tree_reward(draft, Categorical.from_probs(p)), expected)
    above = draft.parents + 1
    single = p[torch.arange(2)[:, None], above, draft.tokens].sum(-1)
    assert not torch.allclose(single, expected, atol=0.1)  # control: no products along paths


def test_the_longest_path_that_a_response_begins_with() -> None:
    wanted = [([0, 0, 2, 1], [3, 1]), ([2, 1, 0, 0], [0, 3]), ([1, 0, 0, 0], [1, 0])]
    for tokens, lengths in wanted:
        assert accepted_length(draft_of(), torch.tensor([tokens] * 2)).tolist() == lengths
    assert accepted_length(draft_of(), torch.tensor([[0], [2]])).tolist() == [1, 1]
    assert accepted_length(draft_of(), torch.tensor([[0, -1], [-1, -1]])).tolist() == [1, 0]


def test_advantages_are_standardised_over_the_real_tokens_of_a_row() -> None:
    gains = torch.tensor([[1.0, 2.0, 3.0, 9.0], [0.5, 0.5, 0.5, 0.5]])
    real = torch.tensor([[True, True, True, False], [True] * 4])
    found = standardise(gains, real)
    assert_close(found[0], torch.tensor([-1.2247, 0.0, 1.2247, 0.0]), atol=1e-3, rtol=1e-3)
    assert not found[1].any()  # nothing was gained anywhere


def test_the_surrogate_is_clipped_on_the_side_of_its_advantage() -> None:
    ratio = torch.tensor([0.5, 1.0, 1.5, 0.5, 1.0, 1.5], requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    found = clipped_surrogate(ratio, advantage, 0.2)
    assert_close(found.detach(), torch.tensor([0.5, 1.0, 1.2, -0.8, -1.0, -1.5]))
    torch.autograd.backward(found.sum())
    assert ratio.grad is not None
    assert (ratio.grad != 0).tolist() == [True, True, False, False, True, True]


@lru_cache(maxsize=1)
def trained() -> Any:
    return overfit_head(target("llava"), lesson("llava", 3), steps=30)


@pytest.mark.exhaustive
def test_trees_are_those_of_decoding() -> None:
    """Accepted lengths of the first round, and the same rewards from another first token."""
    example, reader = lesson("llava", 3), backbone(target("llava"))
    group = grow_group(reader, trained(), example, 0, 6, SMALL)
    fast = mmspec.accelerate(target("llava"), "eagle-2", drafter=trained(), tree=SMALL)
    limits = {"do_sample": False, "max_new_tokens": 10}
    rounds = list(fast.stream(**example.inputs, **limits))
    assert group.lengths[:, 0].tolist() == list(rounds[1].accepted)
    assert int(group.lengths.max()) > 1
    later = grow_group(reader, trained(), example, 3, 3, SMALL)
    assert_close(later.rewards, group.rewards[:, 3:], atol=1e-4, rtol=1e-4)
    assert torch.equal(later.lengths, group.lengths[:, 3:])
    assert not torch.allclose(later.rewards, group.rewards[:, :3], atol=1e-3)  # control


@torch.no_grad()
@pytest.mark.parametrize("maker", ["feature", "eagle3"])
def test_the_likelihood_of_a_path_is_that_of_drafting(maker: str) -> None:
    example, reader = lesson("llava", 3), backbone(target("llava"))
    head = head_of("llava", maker)
    read = read_example(reader, example, tap_of(head, reader))
    lengths = torch.tensor([[2, 0], [0, 1], [1, 3]])
    found = path_likelihood(reader, head, read, example.tokens, 1, lengths)
    for row, place in itertools.product(range(3), range(2)):
        known, total = 2 + place, torch.zeros(())
        for step in range(int(lengths[row, place])):
            path = example.tokens[row, known : known + step].tolist()
            logits = along(reader, head, read, row, known, path)[1]
            total = total + logits.log_softmax(-1)[example.tokens[row, known + step]]
        assert_close(
            found[row, place], total / max(1, int(lengths[row, place])), atol=1e-4, rtol=1e-4
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_moves_the_path_as_its_advantage_says(sign: float) -> None:
    example, reader = lesson("llava", 3), backbone(target("llava"))
    pair = ReferencedHead(head_of("llava"))
    lengths = torch.tensor([[2], [0], [0]])
    advantage = torch.tensor([[sign], [0.0], [0.0]])
    loss = surrogate_loss(reader, pair, example, 2, lengths, advantage)
    assert float(loss.detach()) == pytest.approx(-sign)  # the ratio is 1 at first
    torch.autograd.backward(loss)
    read = read_example(reader, example, "hidden")
    given = (read, example.tokens, 2, lengths)
    with torch.no_grad():
        before = path_likelihood(reader, pair.head, *given)
        for one in pair.head.parameters():
            if one.grad is not None:
                one.sub_(1e-3 * one.grad)
        change = path_likelihood(reader, pair.head, *given) - before
    assert float(change[0, 0]) * sign > 0
    assert all(one.grad is None for one in pair.reference.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("maker", ["feature", "eagle3"])
def test_training_lowers_the_loss_and_saves_the_head_alone(maker: str, tmp_path: Path) -> None:
    example, reader = lesson("llava", 3), backbone(target("llava"))
    old, new = tmp_path / "old", tmp_path / "new"
    head_of("llava", maker).save_pretrained(old)
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    pair = initial_head(recipes.get("gto"), reader, counts, old, (), 0)
    training = replace(GTO, loss=partial(group_loss, group=3, tree=SMALL))
    trainer = HeadTrainer(training, reader, pair, TrainingSettings(6, 2e-3, muon=True))
    torch.manual_seed(0)
    usual = [float(group_loss(reader, pair, example, 1, SMALL, weight=0.0).detach())]
    before = {name: one.clone() for name, one in pair.reference.named_parameters()}
    for _ in range(6):
        trainer.step([lambda: example])
    torch.manual_seed(0)
    usual.append(float(group_loss(reader, pair, example, 1, SMALL, weight=0.0).detach()))
    assert usual[1] < 0.95 * usual[0]
    assert all(torch.equal(one, before[name]) for name, one in pair.reference.named_parameters())
    trainer.trained_head().save_pretrained(new)
    assert sorted(one.name for one in new.iterdir()) == sorted(one.name for one in old.iterdir())
    recipe = "eagle-2" if maker == "feature" else "eagle-3"
    fast = mmspec.accelerate(target("llava"), recipe, drafter=str(new))
    out = fast.generate(**example.inputs, do_sample=False, max_new_tokens=10)
    assert torch.equal(out.sequences[:, -10:], example.tokens)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    reader = backbone(target("llava"))
    counts = torch.ones(reader.vocabulary, dtype=torch.int64)
    with pytest.raises(ValueError, match="give --head the folder of a head"):
        initial_head(recipes.get("gto"), reader, counts, None, (), 0)
    with pytest.raises(ValueError, match="drop --cache"):
        required_features(GTO, reader, ReferencedHead(head_of("llava")))
