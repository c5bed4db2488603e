"""Lookups: short questions about named things whose answers are those of a training scene."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np
import pytest
import torch

from mmspec.zoo.requests.wording import name_of, relate
from tools.zoo.vlm.batches import IGNORED, Encoder
from tools.zoo.vlm.conversations import ConversationEncoder
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.lookups import iterate_lookups, sample_lookups
from tools.zoo.vlm.processors import request_processor
from tools.zoo.vlm.requests import iterate_batches


def test_answers_are_those_of_the_scene() -> None:
    generator, asked = np.random.default_rng(0), set[str]()
    for _ in range(20):
        one = sample_lookups(generator)
        assert one.scene.split == "train"
        named = {name_of(thing): thing for thing in one.scene.things}
        for turn in one.turns:
            if found := re.fullmatch(r"please answer: where is the (.+)\?", turn.prompt):
                thing = named[found[1]]
                assert turn.answer == f"{thing.size} {thing.place}"
            elif found := re.fullmatch(
                r"please answer: which colour do you see (.+)\?", turn.prompt
            ):
                assert named[turn.answer].place == found[1]
            else:
                found = re.fullmatch(
                    r"please answer: is the (.+) (above|below|to the .+ of) the (.+)\?", turn.prompt
                )
                assert found, turn.prompt
                thing, other = named[found[1]], named[found[3]]
                word = "yes" if relate(thing, other) == found[2] else "no"
                assert turn.answer == f"{thing.place}, {other.place}, {word}"
            asked.add(turn.prompt.split()[2])
    assert asked == {"where", "which", "is"}


@pytest.mark.parametrize(
    "family", ["llava", pytest.param("qwen2.5-vl", marks=pytest.mark.exhaustive)]
)
def test_batches_have_known_words_and_a_share_of_lookups(family: str) -> None:
    processor = request_processor(family)
    encoder = ConversationEncoder(FAMILIES[family], processor)
    short = Encoder(FAMILIES[family], processor)
    lookup = next(iterate_lookups(encoder, 3))
    assert encoder.tokenizer.unk_token_id not in lookup.ids
    assert torch.equal(next(iterate_batches(encoder, short, 3, 1.0)).ids, lookup.ids)
    without = [len(one.ids) for one in islice(iterate_batches(encoder, short, 3), 3)]
    assert len(lookup.ids) not in without
    mixed = [len(one.ids) for one in islice(iterate_batches(encoder, short, 3, 0.5), 8)]
    assert 1 < mixed.count(len(lookup.ids)) < 7
    answered = (lookup.labels != IGNORED).float().mean()
    assert 0.15 < float(answered) < 0.6
