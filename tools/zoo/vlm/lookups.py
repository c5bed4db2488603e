"""Many short questions about one scene, each answered in a few words: finding a thing by its name.

Answers of several sentences name most things in the order of the board, so a model learns their
wording long before it learns to find a thing that a question names. Here nearly every token of an
answer has to be found in the picture.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmspec.zoo.language import spell
from mmspec.zoo.requests import Request, Turn
from mmspec.zoo.requests.wording import name_of, negate, relate
from mmspec.zoo.scene import Thing, sample_board
from tools.zoo.vlm.batches import Batch
from tools.zoo.vlm.conversations import ConversationEncoder

_OPENING = "please answer:"  # tells these questions from those with answers of several sentences
_BATCH, _TURNS = 16, 10
_FEWEST, _MOST, _DIGIT_RATE = 3, 7, 0.35  # things on a board, and the share of digits


def iterate_lookups(encoder: ConversationEncoder, seed: int) -> Iterator[Batch]:
    """Iterate over batches of conversations of short questions, without end."""
    generator = np.random.default_rng((seed, 13))
    while True:
        yield encoder.encode([sample_lookups(generator) for _ in range(_BATCH)])


def sample_lookups(generator: np.random.Generator) -> Request:
    """Sample a training scene, and questions about its things."""
    while True:
        count = int(generator.integers(_FEWEST, _MOST + 1))
        scene = sample_board(generator, count, _DIGIT_RATE)
        if scene.split == "train":
            break
    turns = []
    for _ in range(_TURNS):
        one, other = generator.choice(len(scene.things), 2, replace=False)
        prompt, answer = _ask(scene.things[one], scene.things[other], generator)
        turns.append(Turn(spell(f"{_OPENING} {prompt}"), spell(answer), ()))
    return Request("short-question", scene, tuple(turns))


def _ask(one: Thing, other: Thing, generator: np.random.Generator) -> tuple[str, str]:
    """A question about a thing, or about it and another one, and its answer."""
    match generator.integers(4):
        case 0 | 1:
            return f"where is the {name_of(one)}?", f"{one.size} {one.place}"
        case 2:
            return f"which colour do you see {one.place}?", name_of(one)
        case _:
            truth = relate(one, other)
            is_true = generator.random() < 0.5
            claim, word = (truth, "yes") if is_true else (negate(truth), "no")
            prompt = f"is the {name_of(one)} {claim} the {name_of(other)}?"
            return prompt, f"{one.place}, {other.place}, {word}"
