"""Conversations are encoded as the chat template writes them, turn by turn."""

from __future__ import annotations

import pytest
import torch

from mmspec.zoo.requests import requests
from tools.zoo.vlm.batches import IGNORED
from tools.zoo.vlm.conversations import ConversationEncoder, make_inputs
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.processors import request_processor


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_labels_are_the_answers_and_prompts_are_prefixes(name: str) -> None:
    encoder = ConversationEncoder(FAMILIES[name], request_processor(name))
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


def test_prompts_are_padded_on_the_left() -> None:
    encoder = ConversationEncoder(FAMILIES["llava"], request_processor("llava"))
    inputs = make_inputs(encoder, requests(3, category="caption"), [(), (), ()])
    assert inputs["pixel_values"].shape == (3, 3, 48, 48)
    assert bool((inputs["attention_mask"].sum(1) == (inputs["input_ids"] != 0).sum(1)).all())
