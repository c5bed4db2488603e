"""Questions about clips that a document has to answer: it says which thing a name stands for.

"bruno is the red circle." Several documents are retrieved for "where does bruno go?"; they name
different things, and one of them is in the clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmspec.zoo.captions import format_thing
from mmspec.zoo.clip_questions import ClipExample, write_motion
from mmspec.zoo.language import spell
from mmspec.zoo.motion import MovingScene, sample_moving_scenes
from mmspec.zoo.scene import COLOURS, DIGITS, SHAPES, Split

NAMES = ("alma", "bruno", "clara", "dario", "elena", "hugo", "irma", "jonas", "luis", "nora")
DOCUMENTS = 4  # retrieved for a question
_THINGS = (*SHAPES, *(f"digit {digit}" for digit in DIGITS))
_MOVER_RATE = 0.6  # of questions about a thing that moves for certain
_ALIKE_RATE = 0.5  # of wrong things: with the colour or the shape of a thing of the clip


@dataclass(frozen=True)
class DocumentQuestion:
    """A question with a name in it, and documents; `right` is that of a thing of the clip.

    The answer of the example, and its facts, are what that thing does.
    """

    example: ClipExample
    subjects: tuple[str, ...]  # of the documents: "red circle"
    documents: tuple[str, ...]
    right: int


def document_questions(
    count: int, split: Split = "held-out", seed: int = 0, size: int = 96
) -> list[DocumentQuestion]:
    """Return `count` questions about clips with frames of `size` pixels, one per clip."""
    found = sample_moving_scenes(count, split, seed)
    return [write_document_question(scene, number, size) for scene, number in found]


def write_document_question(scene: MovingScene, number: int, size: int = 96) -> DocumentQuestion:
    """Write a question about a thing of a clip; `number` seeds the choice of everything."""
    generator = np.random.default_rng((number, 19))
    name = NAMES[generator.integers(len(NAMES))]
    prompts = (f"where does {name} go?", f"what does {name} do?")
    thing = _pick_thing(scene, generator)
    shown = [f"{one.colour} {one.name}" for one in scene.things]
    subjects = _sample_others(shown, DOCUMENTS - 1, generator)
    right = int(generator.integers(DOCUMENTS))
    subjects.insert(right, shown[thing])
    motion, fact = write_motion(scene, thing)
    answer = spell(f"the {format_thing(scene.things[thing])} {motion}.")
    prompt = prompts[generator.integers(len(prompts))]
    return DocumentQuestion(
        ClipExample(scene, prompt, answer, (fact,), size),
        tuple(subjects),
        tuple(f"{name} is the {one}." for one in subjects),
        right,
    )


def _pick_thing(scene: MovingScene, generator: np.random.Generator) -> int:
    if generator.random() < _MOVER_RATE:
        return scene.moves[generator.integers(len(scene.moves))].thing
    return int(generator.integers(len(scene.things)))


def _sample_others(shown: list[str], count: int, generator: np.random.Generator) -> list[str]:
    """Sample different things that are not in the clip, some of them like one that is."""
    found: list[str] = []
    while len(found) < count:
        colour = COLOURS[generator.integers(len(COLOURS))]
        thing = _THINGS[generator.integers(len(_THINGS))]
        if generator.random() < _ALIKE_RATE:
            own, _, its = shown[generator.integers(len(shown))].partition(" ")
            colour, thing = (own, thing) if generator.random() < 0.5 else (colour, its)
        if (one := f"{colour} {thing}") not in (*shown, *found):
            found.append(one)
    return found
