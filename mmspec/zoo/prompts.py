"""Prompts for image generation: short descriptions of scenes of one to three things."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmspec.zoo.captions import AT, join_phrases
from mmspec.zoo.language import spell
from mmspec.zoo.scene import Scene, Split, Thing, sample

MAX_THINGS = 3  # things in a prompt
_OMISSION_RATE = 0.08  # of size, colour and place in a training prompt, each
_TERSE_RATE = 0.25  # of training prompts in note form
_MAX_THINGS_RATE = 0.25  # of scenes that may have three things
_FIRST_SEED = 1 << 44  # these scenes have their own range of seeds


@dataclass(frozen=True)
class Prompt:
    """A scene and its description."""

    scene: Scene
    text: str


def write_prompt(scene: Scene) -> str:
    """Describe a scene: "a large red circle in the center and a small blue star at the top"."""
    return spell(
        join_phrases([f"a {t.size} {t.colour} {t.name} {AT[t.place]}" for t in scene.things])
    )


def prompts(n: int, split: Split = "held-out", seed: int = 0) -> list[Prompt]:
    """Return `n` full descriptions of scenes of a split."""
    found: list[Prompt] = []
    for scene in _iterate_scenes(split, seed):
        if len(found) == n:
            break
        found.append(Prompt(scene, write_prompt(scene)))
    return found


def iterate_training_scenes(seed: int) -> Iterator[Scene]:
    """Iterate over scenes of the training split, without end."""
    return _iterate_scenes("train", seed)


def write_varied_prompt(scene: Scene, generator: np.random.Generator) -> str:
    """Sample a description of a scene: in any order, sometimes terse or incomplete."""
    is_terse = generator.random() < _TERSE_RATE
    order = generator.permutation(len(scene.things))
    phrases = [_write_phrase(scene.things[i], is_terse, generator) for i in order]
    return ", ".join(phrases) if is_terse else spell(join_phrases(phrases))


def _write_phrase(thing: Thing, is_terse: bool, generator: np.random.Generator) -> str:
    size, colour, place = generator.random(3) > _OMISSION_RATE
    where = thing.place if is_terse else AT[thing.place]
    words = [thing.size, thing.colour, thing.name, where]
    included = [w for w, keep in zip(words, (size, colour, True, place), strict=True) if keep]
    return " ".join(included if is_terse else ["a", *included])


def _iterate_scenes(split: Split, seed: int) -> Iterator[Scene]:
    """Iterate over scenes from which things were removed: most have one or two."""
    generator = np.random.default_rng((seed, 3))
    number = _FIRST_SEED + (seed << 24)
    while True:
        things = sample(number).things
        is_large = generator.random() < _MAX_THINGS_RATE
        count = MAX_THINGS if is_large else 1 + int(generator.integers(2))
        indices = sorted(generator.permutation(len(things))[:count])
        scene = Scene(tuple(things[i] for i in indices))
        if scene.split == split:
            yield scene
        number += 1
