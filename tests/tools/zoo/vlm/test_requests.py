"""Conversations are encoded as the chat template writes them, turn by turn."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.training.fitting import TrainingRun
from mmspec.zoo.requests import requests, score_turn
from tools.zoo.vlm.batches import IGNORED, Encoder
from tools.zoo.vlm.conversations import ConversationEncoder, make_inputs
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.processors import request_processor, text_tokenizer
from tools.zoo.vlm.requests import PLANS, answer, iterate_batches, start_model

# Facts right on 12 requests; the card says how many on 40.
FLOORS = {
    **{"short-question": 0.6, "text": 0.65, "caption": 0.85},
    **{"chart": 0.85, "conversation": 0.85},
}


def make_encoder(name: str) -> ConversationEncoder:
    if name == "text":
        return ConversationEncoder(None, text_tokenizer())
    return ConversationEncoder(FAMILIES[name], request_processor(name))


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "text"])
def test_labels_are_the_answers_and_prompts_are_prefixes(name: str) -> None:
    encoder = make_encoder(name)
    some = requests(6, "train")
    batch = encoder.encode(some)
    for one, ids, labels in zip(some, batch.ids, batch.labels, strict=True):
        known = labels != IGNORED
        assert torch.equal(ids[known], labels[known])
        text = encoder.tokenizer.decode(labels[known], skip_special_tokens=True)
        assert text == " ".join(turn.answer for turn in one.turns)
        assert int((labels == encoder.tokenizer.eos_token_id).sum()) == len(one.turns)
        answers = [turn.answer for turn in one.turns]
        for done in range(len(answers)):
            prompt = encoder.prompt(one, answers[:done])
            assert prompt == ids[: len(prompt)].tolist()
            assert known[len(prompt)]
            assert not known[len(prompt) - 1]
    assert encoder.tokenizer.unk_token_id not in batch.ids
    assert batch.images.shape[1:] == ((0,) if name == "text" else (48, 48, 3))


def test_prompts_are_padded_on_the_left() -> None:
    encoder = ConversationEncoder(FAMILIES["llava"], request_processor("llava"))
    inputs = make_inputs(encoder, requests(3, category="caption"), [(), (), ()])
    assert inputs["pixel_values"].shape == (3, 3, 48, 48)
    assert bool((inputs["attention_mask"].sum(1) == (inputs["input_ids"] != 0).sum(1)).all())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("category", FLOORS)
def test_the_bundled_targets_answer_as_their_cards_say(name: str, category: str) -> None:
    model: Any = zoo.load(name)
    encoder = ConversationEncoder(FAMILIES[PLANS[name].family], zoo.processor(name))
    asked = requests(12, "held-out", seed=1, category=category)
    answers = answer(model, encoder, asked)
    scores = [
        score_turn(request, turn, text)
        for request, texts in zip(asked, answers, strict=True)
        for turn, text in zip(request.turns, texts, strict=True)
    ]
    right, required = (sum(column) for column in zip(*scores, strict=True))
    assert right > FLOORS[category] * required


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANS)
def test_a_conversation_is_answered_as_by_the_model_itself(name: str) -> None:
    model: Any = zoo.load(name)
    encoder = ConversationEncoder(FAMILIES[PLANS[name].family], zoo.processor(name))
    asked = requests(2, "held-out", seed=2, category="conversation")
    turns = asked[0].turns
    inputs = make_inputs(encoder, asked, [[turns[0].answer], [asked[1].turns[0].answer]])
    fast = mmspec.accelerate(model, "prompt-lookup")
    how = {"max_new_tokens": 96, "do_sample": False}
    expected = model.generate(**inputs, **how)
    found = fast.generate(**inputs, **how)
    assert torch.equal(found.sequences, expected)
    assert found.stats.mean_acceptance_length > 1.2


def test_a_prompt_has_one_kind_of_answer() -> None:
    """Every fifth batch has what `llava` knows, without the questions that requests ask too."""
    processor = request_processor("llava")
    encoder = ConversationEncoder(FAMILIES["llava"], processor)
    batches = iterate_batches(encoder, Encoder(FAMILIES["llava"], processor), 0)
    for known in islice(batches, 4, 20, 5):
        for text in encoder.tokenizer.batch_decode(known.ids, skip_special_tokens=True):
            prompt = text.split("assistant")[0]
            assert not re.search(r": *(is the|where is the) ", prompt), prompt


def test_a_model_starts_with_the_text_of_one_and_the_eyes_of_another() -> None:
    """Text layers and words of `llava-chat`, vision tower of `qwen2.5-vl`, for another class."""
    plan = replace(PLANS["qwen2.5-vl-chat"], vision_steps=0)
    processor: Any = request_processor(plan.family)
    model: Any = start_model(plan, processor, TrainingRun())
    text, tower = zoo.load(plan.start), zoo.load(plan.tower)
    assert type(model) is type(tower)
    for name, weight in text.get_decoder().layers.named_parameters():
        assert torch.equal(model.get_decoder().layers.get_parameter(name), weight.float()), name
    for name, weight in tower.named_parameters():
        if "visual" in name:
            assert torch.equal(model.get_parameter(name), weight.float()), name
    word = [one.tokenizer.get_vocab()["triangle"] for one in (processor, zoo.processor(plan.start))]
    own, other = (one.get_input_embeddings().weight for one in (model, text))
    assert torch.equal(own[word[0]], other[word[1]].float())
    assert model.config.get_text_config().max_position_embeddings == 1024


def test_the_tower_learns_the_image_features_of_the_start() -> None:
    """Two steps of another family's start change the tower alone."""
    plan, losses = replace(PLANS["qwen2.5-vl-chat"], vision_steps=2), list[float]()
    run = TrainingRun(progress=lambda stage, step, steps, loss: losses.append(loss))
    processor: Any = request_processor(plan.family)
    torch.manual_seed(0)
    model: Any = start_model(plan, processor, run)
    torch.manual_seed(0)
    apart: Any = start_model(replace(plan, vision_steps=0), processor, run)
    changed = [
        name
        for name, weight in model.named_parameters()
        if not torch.equal(weight, apart.get_parameter(name))
    ]
    assert changed
    assert all("visual" in name for name in changed)
    assert losses
    assert model.training
