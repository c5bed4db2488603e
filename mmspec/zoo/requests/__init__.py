"""Requests of six kinds about scenes, after the categories of the MMSpec benchmark.

A short question (GQA), text in the picture (TextVQA), a caption (COCO), a chart (CharXiv),
reasoning (MMMU-Pro) and a conversation of four turns (ConvBench, MM-MT-Bench). Answers have as many
tokens in the mean as there (Shen et al. 2026, arXiv 2603.14989): about 47, 63, 192 and 69; those of
reasoning and conversations a third of it, 95 and 249 for 286 and 748. Wordings and orders are drawn
at random.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image

from mmspec.zoo.catalogue import info
from mmspec.zoo.facts import find_mentions
from mmspec.zoo.language import spell, words
from mmspec.zoo.requests.answers import (
    Answered,
    Facts,
    Writer,
    write_brief_caption,
    write_caption,
    write_reasoning,
    write_short,
    write_text,
)
from mmspec.zoo.requests.charts import sample_chart, write_chart
from mmspec.zoo.requests.wording import NUMBERS, Wording
from mmspec.zoo.scene import DIGITS, Scene, Split, sample_board

CATEGORIES = ("short-question", "text", "caption", "chart", "reasoning", "conversation")
TRAINERS = ("tools.zoo.vlm.requests", "tools.zoo.vlm.text")  # of the targets trained on them
_THINGS = {"caption": (5, 7), "reasoning": (4, 6)}  # fewest and most things on a board
_OTHER_THINGS = (3, 6)
_DIGIT_RATES = {"text": 0.65}  # share of digits among the things
_OTHER_DIGIT_RATE = 0.35
_WRITERS: dict[str, Writer] = {
    "short-question": write_short,
    "text": write_text,
    "caption": write_caption,
    "chart": write_chart,
    "reasoning": write_reasoning,
}
_FIRST_SEED = {"train": 1 << 46, "held-out": 1 << 47}


@dataclass(frozen=True)
class Turn:
    """A prompt, a correct answer, and the facts of an answer; no facts: those of the scene."""

    prompt: str
    answer: str
    facts: Facts


@dataclass(frozen=True)
class Request:
    """A scene, and one or more turns about its image."""

    category: str
    scene: Scene
    turns: tuple[Turn, ...]

    @property
    def image(self) -> Image.Image:
        """The image, 192 pixels wide."""
        return self.scene.render(192)


def requests(
    n: int, split: Split = "held-out", seed: int = 0, category: str | None = None
) -> list[Request]:
    """Return `n` requests of a category, or of all in turn; the two splits share no scene.

    Raises ValueError for other categories and splits.
    """
    stream = iterate_requests(split, seed, category)
    return [next(stream) for _ in range(n)]


def is_trained_on_requests(model: str) -> bool:
    """Whether a bundled target, `zoo:NAME`, is trained on these requests."""
    entry = info(model)
    return entry.target is None and entry.trainer in TRAINERS


def write_scene_into_prompt(request: Request) -> Request:
    """Return the request for a text model: its first prompt begins with a list of all things.

    "small red circle top left, large blue digit two center. which digits can you read?"
    """
    things = [f"{t.size} {t.colour} {t.name} {t.place}" for t in request.scene.things]
    first, *others = request.turns
    first = replace(first, prompt=f"{', '.join(things)}. {first.prompt}")
    return replace(request, turns=(first, *others))


def iterate_requests(split: Split, seed: int, category: str | None = None) -> Iterator[Request]:
    """Iterate over requests without end. Raises ValueError for other categories and splits."""
    if category is not None and category not in CATEGORIES:
        raise ValueError(f"category is {category!r}; it must be one of {', '.join(CATEGORIES)}")
    if split not in _FIRST_SEED:
        raise ValueError(f"split is {split!r}; it must be 'train' or 'held-out'")
    return _iterate(split, seed, CATEGORIES if category is None else (category,))


def score_turn(request: Request, turn: Turn, text: str) -> tuple[int, int]:
    """Return (facts right, facts required) of a text that answers a turn, in any wording.

    Of a caption: name, colour, size and place of every thing, each by the mention that agrees best;
    a mention of a thing that is not there is one more fact, which is wrong.
    """
    if turn.facts:
        return sum(_states(kind, value, text) for kind, value in turn.facts), len(turn.facts)
    mentions, things = find_mentions(text), request.scene.facts()
    right = sum(
        max(
            (
                sum(a == b for a, b in zip((m.size, m.colour, m.name, m.place), fact, strict=True))
                for m in mentions
            ),
            default=0,
        )
        for fact in things
    )
    known = {(colour, name) for _, colour, name, _ in things}
    wrong = {(m.colour, m.name) for m in mentions if m.colour and (m.colour, m.name) not in known}
    return right, 4 * len(things) + len(wrong)


@cache  # reads 3,000 requests
def request_words() -> tuple[str, ...]:
    """Return every word of these requests, in alphabetical order."""
    found = {*NUMBERS, *DIGITS}
    for request in requests(3000, "train"):
        for turn in request.turns:
            found.update(words(turn.prompt), words(turn.answer))
    return tuple(sorted(found))


def _iterate(split: Split, seed: int, categories: tuple[str, ...]) -> Iterator[Request]:
    number = _FIRST_SEED[split] + (seed << 24)
    taken = 0
    while True:
        generator = np.random.default_rng((number, 11))
        category = categories[taken % len(categories)]
        scene = _sample_scene(category, generator)
        if scene.split == split:
            yield Request(category, scene, _write_turns(category, scene, Wording(generator)))
            taken += 1
        number += 1


def _sample_scene(category: str, generator: np.random.Generator) -> Scene:
    if category == "chart":
        return sample_chart(generator)
    least, most = _THINGS.get(category, _OTHER_THINGS)
    count = int(generator.integers(least, most + 1))
    return sample_board(generator, count, _DIGIT_RATES.get(category, _OTHER_DIGIT_RATE))


def _write_turns(category: str, scene: Scene, say: Wording) -> tuple[Turn, ...]:
    if category != "conversation":
        return (_make_turn(_WRITERS[category](scene, say)),)
    others = (write_short, write_text, write_reasoning)
    writers = [write_brief_caption, *(others[i] for i in say.generator.permutation(len(others)))]
    return tuple(_make_turn(write(scene, say)) for write in writers)


def _make_turn(answered: Answered) -> Turn:
    prompt, answer, facts = answered
    return Turn(spell(prompt), spell(answer), facts)


def _states(kind: str, value: str, text: str) -> bool:
    """Whether a text states a fact."""
    if kind == "final":
        found = re.findall(r"answer is ([\w ]+)", text)
        return bool(found) and found[-1].strip() == value
    if kind == "digits":
        read = [word for word in re.findall(r"digit (\w+)", text) if word in DIGITS]
        return sorted(set(read)) == sorted(set(value.split()))
    sentence = next((part for part in re.split(r"[.?!]", text) if kind in part), "")
    return next((word for word in words(sentence) if word in NUMBERS), None) == value
