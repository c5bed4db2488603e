"""Held-out sentences for the bundled codec language models, and the speakers that they know."""

from __future__ import annotations

from itertools import count

from mmspec.modalities.speech.sentences import sentence
from mmspec.modalities.speech.utterances import Voice
from mmspec.zoo.scene import Split

SPEAKERS = {"paul": Voice("en-us"), "ada": Voice("en-us+f3")}


def texts(sentences: int, first: int = 0) -> list[str]:
    """Different held-out sentences."""
    return [sentence(seed, "held-out") for seed in seeds(sentences, "held-out", first)]


def voices(number: int) -> list[str]:
    """Speakers in turn."""
    return [list(SPEAKERS)[index % len(SPEAKERS)] for index in range(number)]


def seeds(sentences: int, split: Split, first: int = 0) -> list[int]:
    """Seeds of so many different sentences, from the first seed on."""
    found: list[int] = []
    seen: set[str] = set()
    for seed in count(first):
        if len(found) == sentences:
            break
        text = sentence(seed, split)
        if text not in seen:
            seen.add(text)
            found.append(seed)
    return found
