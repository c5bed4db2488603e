"""Captions: six ways of telling what is in a scene, chosen by the wording of the prompt.

The words depend on the picture throughout: the order of the things, what the previous thing was,
which verb goes with which shape. A reader who sees must plan ahead; a reader who does not, guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def caption(scene: Scene, generator: np.random.Generator) -> tuple[str, str]:
    """A prompt and the caption it asks for."""
    prompts, write = _STYLES[generator.integers(len(_STYLES))]
    prompt = prompts[generator.integers(len(prompts))]
    return prompt, write(scene, generator)


def named(thing: Thing, small: str = "small", large: str = "large") -> str:
    """A noun phrase: "large red circle"."""
    return f"{small if thing.size == 'small' else large} {thing.colour} {thing.name}"


def counted(number: int, noun: str, adjective: str = "") -> str:
    """ "three things", "one thing", "no small things"."""
    words = [COUNTS[number], adjective, noun if number == 1 else noun + "s"]
    return " ".join(word for word in words if word)


def listed(phrases: Sequence[str]) -> str:
    """Join phrases: "a, b and c"."""
    head = ", ".join(phrases[:-1])
    return f"{head} and {phrases[-1]}" if head else phrases[-1]


def _plain(scene: Scene, generator: np.random.Generator) -> str:
    opening = generator.choice(["the picture shows", "here we see"], p=[0.7, 0.3])
    phrases = [f"a {named(t)} {AT[t.place]}" for t in scene.things]
    return f"{opening} {counted(len(phrases), 'thing')}: {listed(phrases)}."


def _walk(direction: str) -> Writer:
    def write(scene: Scene, generator: np.random.Generator) -> str:
        things = sorted(scene.things, key=_ORDERS[direction])
        sentences = []
        for i, thing in enumerate(things):
            link = f"{direction}, first" if i == 0 else "then"
            link = "and finally" if 0 < i == len(things) - 1 else link
            size = "tiny" if thing.size == "small" else "huge"
            where = AT[thing.place]
            sentences.append(
                f"{link} comes a {thing.colour} {thing.name}, which looks {size} {where}."
            )
        return " ".join(sentences)

    return write


def _places(scene: Scene, generator: np.random.Generator) -> str:
    phrases = []
    for i, thing in enumerate(scene.things):
        also = "" if i == 0 else "also "
        verb = f"there is {also}" if thing.digit is None else f"somebody {also}wrote "
        article = "another" if any(t.name == thing.name for t in scene.things[:i]) else "a"
        phrases.append(f"{AT[thing.place]} {verb}{article} {named(thing)}.")
    return " ".join(phrases)


def _story(scene: Scene, generator: np.random.Generator) -> str:
    first, *others = scene.things
    size = "little" if first.size == "small" else "big"
    text = (
        f"once upon a time a {size} {first.colour} {first.name} {_verb(first)} {AT[first.place]}."
    )
    previous = first
    for thing in others:
        name = named(thing, "little", "big")
        text += f" {_beside(thing, previous)} it a {name} {_verb(thing)} {AT[thing.place]}."
        previous = thing
    return text


def _by_size(scene: Scene, generator: np.random.Generator) -> str:
    sentences = []
    for size in ("large", "small"):
        group = [t for t in scene.things if t.size == size]
        text = f"there {'is' if len(group) == 1 else 'are'} {counted(len(group), 'thing', size)}"
        phrases = [f"the {t.colour} {t.name} {AT[t.place]}" for t in group]
        sentences.append(f"{text}: {listed(phrases)}." if group else f"{text}.")
    return " ".join(sentences)


def _verb(thing: Thing) -> str:
    return _VERBS[thing.shape]


def _beside(thing: Thing, other: Thing) -> str:
    """Where a thing is, seen from one before it in reading order."""
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
        ((f"describe the picture {way}.", f"go {way}.", f"list everything {way}."), _walk(way))
        for way in _ORDERS
    ),
)
