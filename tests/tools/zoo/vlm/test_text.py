"""The text pair: deeper layers change nothing before training; the bundled pair is as its cards."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.zoo.catalogue import load_folder
from mmspec.zoo.requests import requests, score_turn
from tools.zoo.vlm.conversations import ConversationEncoder, make_inputs
from tools.zoo.vlm.processors import text_tokenizer
from tools.zoo.vlm.requests import answer
from tools.zoo.vlm.text import PLANS, acceptance, build, deepen

# Facts right on 12 requests; the card says how many on 40.
FLOORS = {"text": 0.6, "caption": 0.7, "chart": 0.5, "conversation": 0.7}
LONG = ("caption", "conversation")


@pytest.fixture(scope="module")
def encoder() -> ConversationEncoder:
    return ConversationEncoder(None, zoo.processor("text"))


@pytest.mark.parametrize("name", list(PLANS))
def test_plans_build_what_is_there(name: str) -> None:
    there, tokenizer = zoo.load(name), zoo.processor(name)
    made = build(PLANS[name].shape, tokenizer)
    assert {n: w.shape for n, w in made.named_parameters()} == {
        n: w.shape for n, w in there.named_parameters()
    }
    assert there.config.max_position_embeddings == made.config.max_position_embeddings == 1024
    assert tokenizer.get_vocab() == text_tokenizer().get_vocab()
    assert tokenizer.chat_template == text_tokenizer().chat_template


def test_a_deeper_model_computes_the_same_and_its_new_layers_learn() -> None:
    plan, tokenizer = PLANS["text"], zoo.processor("text")
    torch.manual_seed(0)
    shallow = build(replace(plan.shape, layers=plan.shallow), tokenizer)
    deep = deepen(shallow, plan.shape, tokenizer)
    ids = torch.randint(4, len(tokenizer), (2, 12))
    assert len(deep.model.layers) == plan.shape.layers > len(shallow.model.layers)
    logits = deep(input_ids=ids).logits
    assert torch.allclose(logits, shallow(input_ids=ids).logits, atol=1e-5)
    logits.square().mean().backward()
    added: Any = deep.model.layers[1]
    assert added.self_attn.o_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "category",
    [
        pytest.param(one, marks=getattr(pytest.mark, "slow" if one in LONG else "exhaustive"))
        for one in FLOORS
    ],
)
def test_the_bundled_target_answers_as_its_card_says(
    category: str, encoder: ConversationEncoder
) -> None:
    asked = requests(12, "held-out", seed=1, category=category)
    answers = answer(zoo.load("text"), encoder, asked)
    scores = [
        score_turn(request, turn, text)
        for request, texts in zip(asked, answers, strict=True)
        for turn, text in zip(request.turns, texts, strict=True)
    ]
    right, required = (sum(column) for column in zip(*scores, strict=True))
    assert right > FLOORS[category] * required


@pytest.mark.exhaustive
def test_the_bundled_draft_model_follows_as_its_card_says(encoder: ConversationEncoder) -> None:
    found = acceptance(zoo.load("text"), zoo.path("text-drafter"), encoder, 4)
    card = (zoo.path("text-drafter") / "README.md").read_text()
    told = re.search(r"^\| acceptance length \| ([\d.]+) \|$", card, re.MULTILINE)
    assert told is not None
    assert found["acceptance length"] == pytest.approx(float(told.group(1)), rel=0.12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["coupled", "dynamic-tree", "prompt-lookup", "token-recycling"])
def test_the_pair_decodes_as_the_target_alone(recipe: str, encoder: ConversationEncoder) -> None:
    model: Any = zoo.load("text")
    inputs = make_inputs(encoder, requests(3, "held-out", seed=2), [()] * 3)
    how = {"max_new_tokens": 48, "do_sample": False}
    plan = mmspec.recipes.get(recipe)
    fast = mmspec.accelerate(model, recipe, drafter=zoo.drafter_for("zoo:text", plan))
    found = fast.generate(**inputs, **how)
    assert torch.equal(found.sequences, model.generate(**inputs, **how))
    assert found.stats.mean_acceptance_length > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_training_writes_a_checkpoint_that_loads(name: str, tmp_path: Path) -> None:
    report = zoo.train(name, tmp_path / name, steps=1)
    model = load_folder(tmp_path / name, sees=False)
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert f"zoo train {name}" in (tmp_path / name / "README.md").read_text()
