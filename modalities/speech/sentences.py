"""Sentences of the Scene world as they are said: short, in lower case, without marks."""

from __future__ import annotations

import re
import zlib

import numpy as np

from mmspec.zoo.language import spell
from mmspec.zoo.prompts import prompt
from mmspec.zoo.questions import question
from mmspec.zoo.scene import Scene, Split, sample

LONGEST = 60  # characters; about four seconds
_DESCRIBED = 0.5  # how often one thing is described; else a question is asked, or answered
_HELD_OUT_SEEDS = 1 << 40
_HELD_OUT_ONE_IN = 8


def sentence(seed: int, split: Split = "train") -> str:
    """A sentence such as "a large red circle in the top left corner".

    The same seed gives the same sentence on every machine. No sentence is on both sides of the
    split, which its letters decide. Raises ValueError for a split that there is not.
    """
    if split not in ("train", "held-out"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'held-out'")
    generator = np.random.default_rng((seed + _HELD_OUT_SEEDS * (split == "held-out"), 7))
    while True:
        text = _said(generator)
        if len(text) <= LONGEST and split_of(text) == split:
            return text


def split_of(text: str) -> Split:
    """The side of the train / held-out division on which a sentence falls."""
    return "held-out" if zlib.crc32(text.encode()) % _HELD_OUT_ONE_IN == 0 else "train"


def _said(generator: np.random.Generator) -> str:
    scene = sample(int(generator.integers(1 << 32)))
    if generator.random() < _DESCRIBED:
        return prompt(Scene(scene.things[:1]))
    asked, answer, _ = question(scene, generator)
    text = asked if generator.random() < 0.5 else answer
    return spell(re.sub(r"[^\w\s]", "", text))
