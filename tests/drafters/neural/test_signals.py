"""Signals of compressors: by slot of each row's prompt, and only for the prompt they belong to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.actions import ActionSpace
from mmspec.codes.episodes import NAME, Episode, VisualHistory
from mmspec.compressors.contract import Features
from mmspec.drafters.neural.signals import FeaturePrompt, collect_signals, required_signals
from mmspec.targets.tokens.context import Context
from tests.drafters.driving import context

IMAGE = 9
ROWS = [[1, IMAGE, IMAGE, 4, 5], [2, IMAGE, IMAGE, 6]]
SLOTS = torch.tensor([1, 2])


def embed(ids: Tensor) -> Tensor:  # (1, T) -> (1, T, 2)
    return torch.stack((ids, -ids), -1).float()


PROMPT = FeaturePrompt(ROWS, frozenset({IMAGE}), embed, placeholder=IMAGE)
IMAGES = Features(torch.zeros(2, 3), SLOTS)


def prepared(**shared: Any) -> Context:
    return replace(context(*ROWS), shared=shared, padding=(0, 1))


def test_attention_is_cut_to_the_slots_of_the_image() -> None:
    attention = torch.arange(10.0).view(2, 5)  # the second row is padded on the left
    signals = collect_signals(frozenset({"attention"}), prepared(attention=attention), PROMPT)
    assert signals(0, IMAGES)["attention"].tolist() == [1, 2]
    assert signals(1, IMAGES)["attention"].tolist() == [7, 8]


def test_states_of_the_question_are_those_of_the_text_after_the_image() -> None:
    states = torch.randn(3, 2, 5, 4)  # (layers, B, L, H)
    needs = frozenset({"states", "question-states"})
    signals = collect_signals(needs, prepared(states=states), PROMPT)
    found = signals(1, IMAGES)
    assert_close(found["states"], states[:, 1, [2, 3]])
    assert_close(found["question-states"], states[:, 1, [4]])
    assert required_signals(needs) == {"states"}
    assert required_signals(frozenset({"text", "question-states"})) == {"states"}


def test_a_question_is_the_text_after_the_last_image_or_all_text() -> None:
    rows = [[1, IMAGE, 4, 5], [1, 2, IMAGE], [IMAGE]]
    prompt = replace(PROMPT, rows=rows)
    signals = collect_signals(frozenset({"text"}), context(*rows), prompt)
    texts = [signals(row, IMAGES)["text"][:, 0].tolist() for row in range(3)]
    assert texts == [[4, 5], [1, 2], [IMAGE]]


def test_class_attention_is_zero_at_text() -> None:
    prompt = replace(PROMPT, cls=(torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])))
    signals = collect_signals(frozenset({"cls"}), prepared(), prompt)
    every = Features(torch.zeros(4, 3), torch.arange(4))
    assert signals(0, every)["cls"].tolist() == [0, 0.25, 0.75, 0]
    assert signals(1, every)["cls"].tolist() == [0, 0.5, 0.5, 0]
    without = collect_signals(frozenset({"cls"}), prepared(), PROMPT)
    assert not without(0, every)["cls"].any()


def test_earlier_images_are_padded_to_the_prompt() -> None:
    episodes = [Episode(object.__new__(ActionSpace)) for _ in ROWS]
    seen = VisualHistory(torch.tensor([0.5, 0.5, 1.0]), [torch.ones(6, 2)], is_fine=True)
    episodes[0].memory[VisualHistory.NAME] = seen
    needs = frozenset({"earlier-attention", "earlier-features", "precision"})
    signals = collect_signals(needs, prepared(**{NAME: episodes}), PROMPT)
    every = Features(torch.zeros(4, 3), torch.arange(4))
    first, second = signals(0, every), signals(1, every)
    assert first["earlier-attention"].tolist() == [0.5, 0.5, 1, 0]
    assert first["earlier-features"].tolist() == [[1, 1]] * 4
    assert (first["precision"].tolist(), second["precision"].tolist()) == ([1], [0])
    assert not second["earlier-attention"].any()
    assert second["earlier-features"].shape == (4, 2)


def test_signals_of_another_prompt_are_refused() -> None:
    other = replace(PROMPT, rows=[[1, IMAGE, IMAGE, 4, 7], ROWS[1]])
    with pytest.raises(ValueError, match="the draft model has another prompt"):
        collect_signals(frozenset({"attention"}), prepared(attention=torch.zeros(2, 5)), other)
    collect_signals(frozenset({"text"}), prepared(), other)  # needs nothing of the target
