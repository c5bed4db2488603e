"""Questions about clips with their answers, and the score of a generated answer.

Facts are which things move, where to and in which order, and which things stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from PIL import Image

from mmspec.zoo.captions import COUNTS, format_count, format_thing, join_phrases
from mmspec.zoo.language import ExampleKind, spell, words
from mmspec.zoo.motion import DIRECTIONS, MovingScene, sample_moving_scenes
from mmspec.zoo.scene import COLOURS, DIGITS, SHAPES, Split, Thing

Fact = tuple[str, str]
Writer = Callable[[MovingScene, np.random.Generator], tuple[str, str, tuple[Fact, ...]] | None]

_CAPTION_RATE = 0.35
_LINKS = ("then", "after that", "and finally")


@dataclass(frozen=True)
class ClipExample:
    """A clip, a prompt, a correct answer, and the facts that an answer must state."""

    scene: MovingScene
    prompt: str
    answer: str
    facts: tuple[Fact, ...]
    size: int = 96  # pixels of a frame

    @cached_property
    def frames(self) -> list[Image.Image]:
        """All frames, at `motion.RATE_HZ`."""
        return self.scene.render(self.size)


def clip_examples(
    count: int,
    split: Split = "held-out",
    seed: int = 0,
    kind: ExampleKind | None = None,
    size: int = 96,
) -> list[ClipExample]:
    """Return `count` examples with frames of `size` pixels; the two splits share no scene."""
    found = []
    for scene, number in sample_moving_scenes(count, split, seed):
        found.append(ClipExample(scene, *write_clip_text(scene, number, kind), size))
    return found


def write_clip_text(
    scene: MovingScene, number: int, kind: ExampleKind | None = None
) -> tuple[str, str, tuple[Fact, ...]]:
    """Return a prompt, an answer and its facts; `number` seeds the choice of the question."""
    generator = np.random.default_rng((number, 7))
    while True:
        is_caption = generator.random() < _CAPTION_RATE if kind is None else kind == "caption"
        write = _describe if is_caption else _WRITERS[generator.integers(len(_WRITERS))]
        found = write(scene, generator)
        if found is not None:
            prompt, answer, facts = found
            prompt = prompt.rstrip(".?") if generator.random() < 0.3 else prompt
            return spell(prompt), spell(answer), facts


def write_motion(scene: MovingScene, thing: int) -> tuple[str, Fact]:
    """Return what a thing does ("goes right from top left to top", "stays at center"), a fact."""
    return _format_motion(scene, thing, "goes"), _fact(scene, thing)


@cache  # describes 1500 clips
def clip_words() -> tuple[str, ...]:
    """Return every word of prompts and answers about clips, in alphabetical order."""
    found: set[str] = set()
    for scene, number in sample_moving_scenes(1500):
        prompt, answer, _ = write_clip_text(scene, number)
        found.update(words(prompt), words(answer))
    return tuple(sorted(found))


def score_clip(example: ClipExample, text: str) -> tuple[int, int]:
    """Return (facts right, facts required) of a text.

    A statement that is made up or repeated counts as one more fact, which is wrong.
    """
    return _score(example.facts, _extract_statements(text), text)


def score_motion(example: ClipExample, text: str) -> tuple[int, int]:
    """Return the same for motion only: initial and final places do not count."""
    facts = tuple(fact for fact in example.facts if not _IS_PLACE.search(fact[1]))
    statements = [one for one in _extract_statements(text) if not _IS_PLACE.search(one)]
    return _score(facts, statements, text)


def _score(facts: Sequence[Fact], statements: Sequence[str], text: str) -> tuple[int, int]:
    found = Counter(statements)
    required = Counter(value for kind, value in facts if kind == "statement")
    right = (found & required).total()
    total = len(facts) + (max(0, found.total() - required.total()) if required else 0)
    movers = [name for name, moves, *_ in _SENTENCE.findall(text) if moves]
    for kind, value in facts:
        match kind:
            case "order":
                right += ", ".join(movers) == value
            case "count":
                right += next((w for w in words(text) if w in COUNTS), None) == value
            case "answer":
                right += next((w for w in words(text) if w in ("yes", "no")), None) == value
    return right, total


_NAME = rf"(?:{'|'.join(COLOURS)}) (?:digit (?:{'|'.join(DIGITS)})|{'|'.join(SHAPES)})"
_PLACE = r"(?:top|bottom)(?: left| right)?|left|right|center"
_SENTENCE = re.compile(
    rf"({_NAME})(?: (moves|goes) ({'|'.join(DIRECTIONS)}) from (?:{_PLACE}) to ({_PLACE})"
    rf"| (stays|is) at ({_PLACE}))"
)
_LAST = "at last"
_IS_PLACE = re.compile(" (begins|ends) ")


def _extract_statements(text: str) -> list[str]:
    """Return statements of a text: moves of things, and their initial and final places."""
    found, last = [], text.find(_LAST)
    for one in _SENTENCE.finditer(text):
        name, moves, direction, to, rests, at = one.groups()
        if moves:
            found.append(f"{name} moves {direction} {to}")
        else:
            when = "ends" if 0 <= last < one.start() else "begins"
            found.append(f"{name} {when if rests == 'is' else rests} {at}")
    return found


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.name}"


def _format_motion(scene: MovingScene, thing: int, verb: str = "moves") -> str:
    """ "moves right from top left to top right", "stays at center"."""
    one, move = scene.things[thing], scene.find_move(thing)
    if move is None:
        return f"stays at {one.place}"
    return f"{verb} {move.direction} from {one.place} to {scene.thing_at_end(thing).place}"


def _fact(scene: MovingScene, thing: int) -> Fact:
    move = scene.find_move(thing)
    motion = "stays" if move is None else f"moves {move.direction}"
    return "statement", f"{_name(scene.things[thing])} {motion} {scene.thing_at_end(thing).place}"


def _order(scene: MovingScene) -> Fact:
    return "order", ", ".join(_name(scene.things[move.thing]) for move in scene.moves)


def _pick(generator: np.random.Generator, *options: str) -> str:
    return options[generator.integers(len(options))]


def _describe(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]]:
    prompt = _pick(generator, "describe the clip.", "what happens?", "tell what happens.")
    things = scene.things
    begins = [f"the {format_thing(one)} is at {one.place}" for one in things]
    ends = [scene.thing_at_end(i) for i in range(len(things))]
    movers = [move.thing for move in scene.moves]
    moves = [
        f"{_LINKS[min(at, 2)]} the {_name(things[i])} {_format_motion(scene, i)}."
        for at, i in enumerate(movers)
    ]
    finally_ = [f"the {_name(one)} is at {one.place}" for one in ends]
    answer = f"at first {join_phrases(begins)}. {' '.join(moves)} {_LAST} {join_phrases(finally_)}."
    facts = [("statement", f"{_name(one)} begins {one.place}") for one in things]
    facts += [_fact(scene, i) for i in movers]
    facts += [("statement", f"{_name(one)} ends {one.place}") for one in ends]
    return prompt, answer, (*facts, _order(scene))


def _movers(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]]:
    prompt = _pick(generator, "how many things move?", "what moves?", "which things move?")
    count = len(scene.moves)
    parts = [
        f"the {_name(scene.things[m.thing])} {_format_motion(scene, m.thing)}" for m in scene.moves
    ]
    verb = "moves" if count == 1 else "move"
    answer = f"{format_count(count, 'thing')} {verb}: {join_phrases(parts)}."
    statements = tuple(_fact(scene, move.thing) for move in scene.moves)
    return prompt, answer, (("count", COUNTS[count]), *statements, _order(scene))


def _where(scene: MovingScene, generator: np.random.Generator) -> tuple[str, str, tuple[Fact, ...]]:
    thing = int(generator.integers(len(scene.things)))
    name = _name(scene.things[thing])
    prompt = _pick(generator, f"where does the {name} go?", f"what does the {name} do?")
    motion, fact = write_motion(scene, thing)
    return prompt, f"the {format_thing(scene.things[thing])} {motion}.", (fact,)


def _first_or_last(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]] | None:
    if len(scene.moves) < 2:
        return None
    which, at = [("first", 0), ("last", -1)][generator.integers(2)]
    thing = scene.moves[at].thing
    motion = f"{format_thing(scene.things[thing])} {_format_motion(scene, thing)}"
    answer = f"the {motion}, and it is the {which}."
    return f"what moves {which}?", answer, (_fact(scene, thing),)


def _before(
    scene: MovingScene, generator: np.random.Generator
) -> tuple[str, str, tuple[Fact, ...]] | None:
    if len(scene.moves) < 2:
        return None
    i, j = (int(one) for one in generator.choice(len(scene.moves), 2, replace=False))
    one, other = (scene.things[scene.moves[k].thing] for k in (i, j))
    early, late = (one, other) if i < j else (other, one)
    word = "yes" if i < j else "no"
    answer = f"{word}, the {_name(early)} moves before the {_name(late)}."
    prompt = f"does the {_name(one)} move before the {_name(other)}?"
    return prompt, answer, (("answer", word),)


_WRITERS: tuple[Writer, ...] = (_movers, _where, _where, _first_or_last, _before)
