"""Captions of scenes in six styles; the wording of the prompt determines the style.

Every word depends on the picture: the order of the things, the previous thing, the verb of a shape.
A model without the picture can only guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mmspec.zoo.scene import Scene, Thing

Writer = Callable[[Scene, np.random.Generator], str]

COUNTS = ("no", "one", "two", "three", "four")
AT = {
    "top left": "in the top left corner",
    "top": "at the top",
    "top right": "in the top right corner",
    "left": "on the left side",
    "center": "in the center",
    "right": "on the right side",
    "bottom left": "in the bottom left corner",
    "bottom": "at the bottom",
    "bottom right": "in the bottom right corner",
}
_VERBS = {
    "circle": "rolled",
    "square": "rested",
    "triangle": "pointed up",
    "star": "was shining",
    "cross": "stood still",
    "ring": "was spinning",
    "diamond": "glittered",
    "digit": "was counting",
}
_ORDERS: dict[str, Callable[[Thing], tuple[int, int]]] = {
    "from left to right": lambda t: (t.column, t.row),
    "from top to bottom": lambda t: (t.row, t.column),
}


def write_caption(scene: Scene, generator: np.random.Generator) -> tuple[str, str]:
    """Sample a prompt and write the caption it requests."""
    prompts, write = _STYLES[generator.integers(len(_STYLES))]
    prompt = prompts[generator.integers(len(prompts))]
    return prompt, write(scene, generator)


def format_thing(thing: Thing, small: str = "small", large: str = "large") -> str:
    """Return a noun phrase: "large red circle"."""
    return f"{small if thing.size == 'small' else large} {thing.colour} {thing.name}"


def format_count(number: int, noun: str, adjective: str = "") -> str:
    """Return a counted noun: "three things", "one thing", "no small things"."""
    words = [COUNTS[number], adjective, noun if number == 1 else noun + "s"]
    return " ".join(word for word in words if word)


def join_phrases(phrases: Sequence[str]) -> str:
    """Join phrases: "a, b and c"."""
    head = ", ".join(phrases[:-1])
    return f"{head} and {phrases[-1]}" if head else phrases[-1]


def _plain(scene: Scene, generator: np.random.Generator) -> str:
    opening = generator.choice(["the picture shows", "here we see"], p=[0.7, 0.3])
    phrases = [f"a {format_thing(t)} {AT[t.place]}" for t in scene.things]
    return f"{opening} {format_count(len(phrases), 'thing')}: {join_phrases(phrases)}."


def _walk(direction: str, scene: Scene, generator: np.random.Generator) -> str:
    things = sorted(scene.things, key=_ORDERS[direction])
    sentences = []
    for i, thing in enumerate(things):
        link = f"{direction}, first" if i == 0 else "then"
        link = "and finally" if 0 < i == len(things) - 1 else link
        size = "tiny" if thing.size == "small" else "huge"
        where = AT[thing.place]
        sentences.append(f"{link} comes a {thing.colour} {thing.name}, which looks {size} {where}.")
    return " ".join(sentences)


def _places(scene: Scene, generator: np.random.Generator) -> str:
    phrases = []
    for i, thing in enumerate(scene.things):
        also = "" if i == 0 else "also "
        verb = f"there is {also}" if thing.digit is None else f"somebody {also}wrote "
        article = "another" if any(t.name == thing.name for t in scene.things[:i]) else "a"
        phrases.append(f"{AT[thing.place]} {verb}{article} {format_thing(thing)}.")
    return " ".join(phrases)


def _story(scene: Scene, generator: np.random.Generator) -> str:
    first, *others = scene.things
    size = "little" if first.size == "small" else "big"
    name, verb = f"{size} {first.colour} {first.name}", _VERBS[first.shape]
    text = f"once upon a time a {name} {verb} {AT[first.place]}."
    previous = first
    for thing in others:
        name = format_thing(thing, "little", "big")
        where = _relative_position(thing, previous)
        text += f" {where} it a {name} {_VERBS[thing.shape]} {AT[thing.place]}."
        previous = thing
    return text


def _by_size(scene: Scene, generator: np.random.Generator) -> str:
    sentences = []
    for size in ("large", "small"):
        group = [t for t in scene.things if t.size == size]
        text = (
            f"there {'is' if len(group) == 1 else 'are'} {format_count(len(group), 'thing', size)}"
        )
        phrases = [f"the {t.colour} {t.name} {AT[t.place]}" for t in group]
        sentences.append(f"{text}: {join_phrases(phrases)}." if group else f"{text}.")
    return " ".join(sentences)


def _relative_position(thing: Thing, other: Thing) -> str:
    """Position of a thing relative to one before it in reading order."""
    if thing.column == other.column:
        return "below"
    side = "right" if thing.column > other.column else "left"
    return f"to the {side} of" if thing.row == other.row else f"further down to the {side} of"


_STYLES: tuple[tuple[tuple[str, ...], Writer], ...] = (
    (("describe the picture.", "what does the picture show?", "what do you see?"), _plain),
    (("where is everything?", "say what is at each place.", "what is where?"), _places),
    (("tell a story about the picture.", "make it a story.", "tell me a tale."), _story),
    (("start with the large things.", "describe the things by size."), _by_size),
    *(
        (
            (f"describe the picture {way}.", f"go {way}.", f"list everything {way}."),
            partial(_walk, way),
        )
        for way in _ORDERS
    ),
)
