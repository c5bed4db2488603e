"""What is asked about a clip, what is answered, and which facts of the answer are right.

A fact is what moves, where to, in which order; and that the rest stays where it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

from mmspec.zoo.captions import COUNTS, counted, listed, named
from mmspec.zoo.language import ExampleKind, spell, words
from mmspec.zoo.moving import DIRECTIONS, MovingScene, moving_scenes
from mmspec.zoo.scene import COLOURS, DIGITS, SHAPES, Split, Thing

Fact = tuple[str, str]
Writer = Callable[[MovingScene, np.random.Generator], tuple[str, str, tuple[Fact, ...]] | None]

_CAPTION_RATE = 0.35
_LINKS = ("then", "after that", "and finally")


@dataclass(frozen=True)
class ClipExample:
    """A clip, what is asked about it, a right answer, and the facts that it must state."""

    frames: list[Image.Image]
    prompt: str
    answer: str
    facts: tuple[Fact, ...]


def clip_examples(
    count: int,
    split: Split = "held-out",
    seed: int = 0,
    kind: ExampleKind | None = None,
    size: int = 96,
) -> list[ClipExample]:
    """`count` examples with frames of `size` pixels. No moving scene is on both sides."""
    found = []
    for scene, number in moving_scenes(count, split, seed):
        found.append(ClipExample(scene.render(size), *tell(scene, number, kind)))
    return found


def tell(
    scene: MovingScene, number: int, kind: ExampleKind | None = None
) -> tuple[str, str, tuple[Fact, ...]]:
    """A prompt, an answer and the facts it must state. `number` picks the question."""
    generator = np.random.default_rng((number, 7))
    while True:
        is_caption = generator.random() < _CAPTION_RATE if kind is None else kind == "caption"
        write = _describe if is_caption else _WRITERS[generator.integers(len(_WRITERS))]
        found = write(scene, generator)
        if found is not None:
            prompt, answer, facts = found
            prompt = prompt.rstrip(".?") if generator.random() < 0.3 else prompt
            return spell(prompt), spell(answer), facts


@cache  # hundreds of clips are told for it
def clip_words() -> tuple[str, ...]:
    """Every word of what is asked and answered about clips, in alphabetical order."""
    found: set[str] = set()
    for scene, number in moving_scenes(1500):
        prompt, answer, _ = tell(scene, number)
        found.update(words(prompt), words(answer))
    return tuple(sorted(found))


def score_clip(example: ClipExample, text: str) -> tuple[int, int]:
    """Facts right and facts asked of an answer.

    What a text makes up, or tells twice, is one more fact, which is wrong.
    """
    return _score(example.facts, _told(text), text)


def score_motion(example: ClipExample, text: str) -> tuple[int, int]:
    """The same of what moves where to and in which order, and of what stays.

    Where things are at first and at last does not count.
    """
    facts = tuple(fact for fact in example.facts if not _PLACED.search(fact[1]))
    return _score(facts, [one for one in _told(text) if not _PLACED.search(one)], text)


def _score(facts: Sequence[Fact], said: Sequence[str], text: str) -> tuple[int, int]:
    told, wanted = Counter(said), Counter(value for kind, value in facts if kind == "told")
    right = (told & wanted).total()
    asked = len(facts) + (max(0, told.total() - wanted.total()) if wanted else 0)
    movers = [who for who, moves, *_ in _SENTENCE.findall(text) if moves]
    for kind, value in facts:
        match kind:
            case "order":
                right += ", ".join(movers) == value
            case "count":
                right += next((w for w in words(text) if w in COUNTS), None) == value
            case "answer":
                right += next((w for w in words(text) if w in ("yes", "no")), None) == value
    return right, asked


_NAME = rf"(?:{'|'.join(COLOURS)}) (?:digit (?:{'|'.join(DIGITS)})|{'|'.join(SHAPES)})"
_PLACE = r"(?:top|bottom)(?: left| right)?|left|right|center"
_SENTENCE = re.compile(
    rf"({_NAME})(?: (moves|goes) ({'|'.join(DIRECTIONS)}) from (?:{_PLACE}) to ({_PLACE})"
    rf"| (stays|is) at ({_PLACE}))"
)
_LAST = "at last"
_PLACED = re.compile(" (begins|ends) ")


def _told(text: str) -> list[str]:
    """What a text says that things do, and where they are at first and at last."""
    found, last = [], text.find(_LAST)
    for one in _SENTENCE.finditer(text):
        who, moves, direction, to, rests, at = one.groups()
        if moves:
            found.append(f"{who} moves {direction} {to}")
        else:
            when = "ends" if 0 <= last < one.start() else "begins"
            found.append(f"{who} {when if rests == 'is' else rests} {at}")
    return found


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.name}"


def _doing(scene: MovingScene, thing: int, verb: str = "moves") -> str:
    """ "moves right from top left to top right", "stays at center"."""
    one, move = scene.things[thing], scene.mover(thing)
    if move is None:
        return f"stays at {one.place}"
    return f"{verb} {move.direction} from {one.place} to {scene.end(thing).place}"


def _fact(scene: MovingScene, thing: int) -> Fact:
    move = scene.mover(thing)
    what = "stays" if move is None else f"moves {move.direction}"
    return "told", f"{_name(scene.things[thing])} {what} {scene.end(thing).place}"


def _order(scene: MovingScene) -> Fact:
    return "order", ", ".join(_name(scene.things[move.thing]) for move in scene.moves)


def _pick(generator: np.random.Generator, *options: str) -> str:
    return options[generator.integers(len(options))]


def _describe(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]]:
    prompt = _pick(generator, "describe the clip.", "what happens?", "tell what happens.")
    things = scene.things
    begins = [f"the {named(one)} is at {one.place}" for one in things]
    ends = [scene.end(i) for i in range(len(things))]
    movers = [move.thing for move in scene.moves]
    moves = [
        f"{_LINKS[min(at, 2)]} the {_name(things[i])} {_doing(scene, i)}."
        for at, i in enumerate(movers)
    ]
    finally_ = [f"the {_name(one)} is at {one.place}" for one in ends]
    answer = f"at first {listed(begins)}. {' '.join(moves)} {_LAST} {listed(finally_)}."
    facts = [("told", f"{_name(one)} begins {one.place}") for one in things]
    facts += [_fact(scene, i) for i in movers]
    facts += [("told", f"{_name(one)} ends {one.place}") for one in ends]
    return prompt, answer, (*facts, _order(scene))


def _movers(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]]:
    prompt = _pick(generator, "how many things move?", "what moves?", "which things move?")
    count = len(scene.moves)
    parts = [f"the {_name(scene.things[m.thing])} {_doing(scene, m.thing)}" for m in scene.moves]
    answer = f"{counted(count, 'thing')} {'moves' if count == 1 else 'move'}: {listed(parts)}."
    told = tuple(_fact(scene, move.thing) for move in scene.moves)
    return prompt, answer, (("count", COUNTS[count]), *told, _order(scene))


def _where(scene: MovingScene, generator: np.random.Generator) -> tuple[str, str, tuple[Fact, ...]]:
    thing = int(generator.integers(len(scene.things)))
    name = _name(scene.things[thing])
    prompt = _pick(generator, f"where does the {name} go?", f"what does the {name} do?")
    answer = f"the {named(scene.things[thing])} {_doing(scene, thing, 'goes')}."
    return prompt, answer, (_fact(scene, thing),)


def _first_or_last(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]] | None:
    if len(scene.moves) < 2:
        return None
    which, at = [("first", 0), ("last", -1)][generator.integers(2)]
    thing = scene.moves[at].thing
    answer = f"the {named(scene.things[thing])} {_doing(scene, thing)}, and it is the {which}."
    return f"what moves {which}?", answer, (_fact(scene, thing),)


def _before(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]] | None:
    if len(scene.moves) < 2:
        return None
    i, j = (int(one) for one in generator.choice(len(scene.moves), 2, replace=False))
    asked, other = (scene.things[scene.moves[k].thing] for k in (i, j))
    early, late = (asked, other) if i < j else (other, asked)
    word = "yes" if i < j else "no"
    answer = f"{word}, the {_name(early)} moves before the {_name(late)}."
    prompt = f"does the {_name(asked)} move before the {_name(other)}?"
    return prompt, answer, (("answer", word),)


_WRITERS: tuple[Writer, ...] = (_movers, _where, _where, _first_or_last, _before)
