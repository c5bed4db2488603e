"""Extract facts from text in any wording, and count how many are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmspec.zoo.scene import COLOURS, DIGITS, SHAPES, Scene

SIZE_OF = {
    "small": "small",
    "tiny": "small",
    "little": "small",
    "large": "large",
    "huge": "large",
    "big": "large",
}
_COUNTS = ("no", "one", "two", "three", "four")
_SIDES = re.compile(r"(?:to the )?(left|right) of(?! the picture)")
_WAYS = re.compile(r"from \w+ to \w+")


@dataclass(frozen=True)
class Mention:
    """One thing as a text describes it; None for what the text omits."""

    name: str
    size: str | None = None
    colour: str | None = None
    place: str | None = None


def find_mentions(text: str) -> list[Mention]:
    """Return the things that a text mentions, in order."""
    found: list[Mention] = []
    for sentence in re.split(r"[.?!]", _without_relations(text)):
        group_size: str | None = None
        current: Mention | None = None
        for clause in re.split(r",|:|;|\band\b", sentence):
            read = _read(clause)
            if read.name:
                if current is not None:
                    found.append(current)
                current = replace(read, size=read.size or group_size)
            elif current is None:
                group_size = read.size
            else:
                current = replace(
                    current,
                    size=read.size or current.size,
                    colour=current.colour or read.colour,
                    place=current.place or read.place,
                )
        if current is not None:
            found.append(current)
    return found


def score_caption(scene: Scene, text: str) -> tuple[int, int]:
    """Return (facts right, facts required): name, colour, size and place of every thing.

    Each thing is matched with the mention that agrees best; each mention is used once. A mention
    beyond the number of things counts as one more fact, which is wrong.
    """
    return score_mentions(scene, find_mentions(text))


def score_mentions(scene: Scene, mentions: Sequence[Mention]) -> tuple[int, int]:
    """Return (facts right, facts required), counted as in `score_caption`."""
    pairs = [
        (_agreement(fact, mention), i, j)
        for i, fact in enumerate(scene.facts())
        for j, mention in enumerate(mentions)
    ]
    right, things, used = 0, set[int](), set[int]()
    for agreed, i, j in sorted(pairs, key=lambda pair: (-pair[0], pair[1:])):
        if i not in things and j not in used:
            right += agreed
            things.add(i)
            used.add(j)
    return right, 4 * len(scene.things) + max(0, len(mentions) - len(scene.things))


def _agreement(fact: tuple[str, str, str, str], mention: Mention) -> int:
    found = (mention.size, mention.colour, mention.name, mention.place)
    return sum(a == b for a, b in zip(fact, found, strict=True))


def score_facts(facts: tuple[tuple[str, str], ...], text: str) -> tuple[int, int]:
    """Return (facts right, facts required) of an answer to a question."""
    right = 0
    for kind, value in facts:
        stated = read_fact(kind, text)
        right += value in (stated or "").split() if kind == "digit" else stated == value
    return right, len(facts)


def read_fact(kind: str, text: str) -> str | None:
    """Return the first word of a kind in a text, or all of its digits, in alphabetical order."""
    words = re.findall(r"\w+", text)
    match kind:
        case "digit":
            return " ".join(sorted({*re.findall(r"digit (\w+)", text)})) or None
        case "count":
            return next((w for w in words if w in _COUNTS), None)
        case "answer":
            return next((w for w in words if w in ("yes", "no")), None)
        case "colour":
            return next((w for w in words if w in COLOURS), None)
        case "size":
            return next((SIZE_OF[w] for w in words if w in SIZE_OF), None)
        case "place":
            return _place(_without_relations(text))
        case "relation":
            found = re.search(r"(left|right) of (?!the picture)|above|below", text)
            return found and (found.group(1) or found.group(0))
    raise ValueError(f"unknown kind of fact {kind!r}")


def _without_relations(text: str) -> str:
    return _WAYS.sub("", _SIDES.sub("beside", text))


def _read(clause: str) -> Mention:
    words = re.findall(r"\w+", clause)
    name = next((w for w in words if w in SHAPES or w == "digit"), "")
    if name == "digit":
        following = words[words.index("digit") + 1 :]
        name = f"digit {following[0]}" if following and following[0] in DIGITS else "digit"
    return Mention(name, read_fact("size", clause), read_fact("colour", clause), _place(clause))


def _place(text: str) -> str | None:
    words = re.findall(r"\w+", text)
    if "center" in words:
        return "center"
    row = next((w for w in words if w in ("top", "bottom")), "")
    column = next((w for w in words if w in ("left", "right")), "")
    return f"{row} {column}".strip() or None
