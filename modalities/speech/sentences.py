"""Sentences of the Scene world for speech: short, lower case, without punctuation."""

from __future__ import annotations

import re
import zlib
from itertools import count

import numpy as np

from mmspec.zoo.language import spell
from mmspec.zoo.prompts import write_prompt
from mmspec.zoo.questions import write_question
from mmspec.zoo.scene import Scene, Split, sample

MAX_CHARACTERS = 60  # characters; about four seconds
_DESCRIPTION_SHARE = 0.5  # share of descriptions of one object; the rest are questions and answers
_HELD_OUT_SEEDS = 1 << 40
_HELD_OUT_ONE_IN = 8


def sentence(seed: int, split: Split = "train") -> str:
    """A sentence such as "a large red circle in the top left corner".

    The same seed gives the same sentence on every machine. The split of a sentence depends on its
    text alone. Raises ValueError for an unknown split.
    """
    if split not in ("train", "held-out"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'held-out'")
    generator = np.random.default_rng((seed + _HELD_OUT_SEEDS * (split == "held-out"), 7))
    while True:
        text = _generate_sentence(generator)
        if len(text) <= MAX_CHARACTERS and split_of(text) == split:
            return text


def split_of(text: str) -> Split:
    """The split of a sentence, by a checksum of its text."""
    return "held-out" if zlib.crc32(text.encode()) % _HELD_OUT_ONE_IN == 0 else "train"


def held_out_sentences(sentences: int, first: int = 0) -> list[str]:
    """Distinct held-out sentences."""
    return [sentence(seed, "held-out") for seed in sentence_seeds(sentences, "held-out", first)]


def sentence_seeds(sentences: int, split: Split, first: int = 0) -> list[int]:
    """Seeds of so many distinct sentences, starting at a seed."""
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


def _generate_sentence(generator: np.random.Generator) -> str:
    scene = sample(int(generator.integers(1 << 32)))
    if generator.random() < _DESCRIPTION_SHARE:
        return write_prompt(Scene(scene.things[:1]))
    query, answer, _ = write_question(scene, generator)
    text = query if generator.random() < 0.5 else answer
    return spell(re.sub(r"[^\w\s]", "", text))
