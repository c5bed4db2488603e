"""Questions about a scene, their answers, and the facts that an answer must state.

A fact is a kind and a word: ("count", "two"), ("colour", "red"), ("answer", "yes").
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmspec.zoo.captions import AT, COUNTS, format_count, format_thing, join_phrases
from mmspec.zoo.scene import COLOURS, DIGITS, SHAPES, SIZES, Scene, Thing

Facts = tuple[tuple[str, str], ...]
QuestionWriter = Callable[[Scene, np.random.Generator], tuple[str, str, Facts] | None]


def write_question(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts]:
    """Sample a prompt with its answer and facts."""
    while True:
        write = _QUESTION_WRITERS[generator.integers(len(_QUESTION_WRITERS))]
        found = write(scene, generator)
        if found is not None:
            return found


def _pick(generator: np.random.Generator, *options: str) -> str:
    return options[generator.integers(len(options))]


def _thing(scene: Scene, generator: np.random.Generator) -> Thing:
    return scene.things[generator.integers(len(scene.things))]


def _count_all(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts]:
    number = len(scene.things)
    prompt = _pick(generator, "how many things are there?", "count the things in the picture.")
    names = join_phrases([f"a {t.colour} {t.name}" for t in scene.things])
    answer = f"there {_be(number)} {format_count(number, 'thing')} in the picture: {names}."
    return prompt, answer, (("count", COUNTS[number]),)


def _count_some(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts]:
    """Count by colour or by size; most often one that occurs in the scene."""
    by_colour = generator.random() < 0.6
    example = _thing(scene, generator)
    if by_colour:
        word = example.colour if generator.random() < 0.7 else _pick(generator, *COLOURS)
        group = [t for t in scene.things if t.colour == word]
    else:
        word = _pick(generator, *SIZES)
        group = [t for t in scene.things if t.size == word]
    prompt = _pick(
        generator, f"how many {word} things are there?", f"count the {word} things in the picture."
    )
    answer = f"there {_be(len(group))} {format_count(len(group), 'thing', word)} in the picture"
    if group:
        answer += ", " + join_phrases([f"a {t.name} {AT[t.place]}" for t in group])
    return prompt, answer + ".", (("count", COUNTS[len(group)]),)


def _colour(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts] | None:
    thing = _thing(scene, generator)
    if sum(t.name == thing.name for t in scene.things) > 1:
        return None
    prompt = _pick(
        generator, f"what colour is the {thing.name}?", f"tell me the colour of the {thing.name}."
    )
    answer = f"the {thing.name} {AT[thing.place]} is {thing.colour}, and it is {thing.size}."
    return prompt, answer, (("colour", thing.colour), ("size", thing.size))


def _place(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts]:
    thing = _thing(scene, generator)
    name = f"{thing.colour} {thing.name}"
    prompt = _pick(generator, f"where is the {name}?", f"in which place do you see the {name}?")
    answer = f"you can see the {format_thing(thing)} {AT[thing.place]} of the picture."
    return prompt, answer, (("place", thing.place), ("size", thing.size))


def _exists(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts]:
    shape = _thing(scene, generator).shape
    if generator.random() < 0.5:
        shape = _pick(generator, "digit", *SHAPES)
    found = [t for t in scene.things if t.shape == shape]
    prompt = _pick(generator, f"is there a {shape}?", f"can you find a {shape} in the picture?")
    if not found:
        return prompt, f"no, there is no {shape} in the picture.", (("answer", "no"),)
    phrases = [f"a {format_thing(t)} {AT[t.place]}" for t in found]
    return prompt, f"yes, there is {join_phrases(phrases)}.", (("answer", "yes"),)


def _digit(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts]:
    digits = [t for t in scene.things if t.digit is not None]
    prompt = _pick(generator, "which digit is written?", "read the digit in the picture.")
    if not digits:
        return prompt, "there is no digit written in the picture.", (("answer", "no"),)
    phrases = [f"the {format_thing(t)} is written {AT[t.place]}" for t in digits]
    facts = tuple(("digit", DIGITS[t.digit]) for t in digits if t.digit is not None)
    return prompt, f"{join_phrases(phrases)}.", facts


def _relation(scene: Scene, generator: np.random.Generator) -> tuple[str, str, Facts] | None:
    if len(scene.things) < 2:
        return None
    i, j = generator.choice(len(scene.things), 2, replace=False)
    a, b = scene.things[i], scene.things[j]
    horizontal = a.row == b.row or (a.column != b.column and generator.random() < 0.5)
    if horizontal:
        truth, lie = "to the left of", "to the right of"
        truth, lie = (truth, lie) if a.column < b.column else (lie, truth)
    else:
        truth, lie = ("above", "below") if a.row < b.row else ("below", "above")
    first, second = f"the {a.colour} {a.name}", f"the {b.colour} {b.name}"
    claim = _pick(generator, truth, lie)
    word = "yes" if claim == truth else "no"
    answer = f"{first} is {AT[a.place]} and {second} is {AT[b.place]}, so it is {truth} it: {word}."
    facts = (("answer", word), ("relation", truth.removeprefix("to the ").removesuffix(" of")))
    return f"is {first} {claim} {second}?", answer, facts


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


_QUESTION_WRITERS: tuple[QuestionWriter, ...] = (
    _count_all,
    _count_some,
    _colour,
    _place,
    _exists,
    _digit,
    _relation,
    _relation,
)
