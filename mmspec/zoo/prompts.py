"""Prompts: short descriptions of scenes of one to three things, to draw pictures by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmspec.zoo.captions import AT, listed
from mmspec.zoo.language import spell
from mmspec.zoo.scene import Scene, Split, Thing, sample

MOST = 3  # things in a prompt
_LEFT_OUT = 0.08  # how often a training prompt leaves out one of size, colour and place
_TERSE = 0.25  # how often a training prompt is in note form
_BUSY = 0.25  # how often more than two things stay
_NUMBERS = 1 << 44  # scenes come from seeds of their own


@dataclass(frozen=True)
class Prompt:
    """A scene and words that describe it."""

    scene: Scene
    text: str


def prompt(scene: Scene) -> str:
    """The full description: "a large red circle in the center and a small star at the top"."""
    return spell(listed([f"a {t.size} {t.colour} {t.name} {AT[t.place]}" for t in scene.things]))


def prompts(n: int, split: Split = "held-out", seed: int = 0) -> list[Prompt]:
    """`n` full descriptions of scenes of one side of the split."""
    found: list[Prompt] = []
    for scene in _lean(split, seed):
        if len(found) == n:
            break
        found.append(Prompt(scene, prompt(scene)))
    return found


def training_scenes(seed: int) -> Iterator[Scene]:
    """Scenes of the training side without end."""
    return _lean("train", seed)


def loose_prompt(scene: Scene, generator: np.random.Generator) -> str:
    """A description as people give it: in any order, now and then terse or incomplete."""
    is_terse = generator.random() < _TERSE
    order = generator.permutation(len(scene.things))
    phrases = [_loose(scene.things[i], is_terse, generator) for i in order]
    return ", ".join(phrases) if is_terse else spell(listed(phrases))


def _loose(thing: Thing, is_terse: bool, generator: np.random.Generator) -> str:
    said = generator.random(3) > _LEFT_OUT
    place = thing.place if is_terse else AT[thing.place]
    words = [thing.size, thing.colour, thing.name, place]
    kept = [w for w, keep in zip(words, (said[0], said[1], True, said[2]), strict=True) if keep]
    return " ".join(kept if is_terse else ["a", *kept])


def _lean(split: Split, seed: int) -> Iterator[Scene]:
    """Scenes with some things taken away, so that most have one or two."""
    generator = np.random.default_rng((seed, 3))
    number = _NUMBERS + (seed << 24)
    while True:
        things = sample(number).things
        most = MOST if generator.random() < _BUSY else 1 + int(generator.integers(2))
        kept = sorted(generator.permutation(len(things))[:most])
        lean = Scene(tuple(things[i] for i in kept))
        if lean.split == split:
            yield lean
        number += 1
