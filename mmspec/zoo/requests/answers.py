"""Questions about one scene with their answers: short, with digits, captions and reasoning.

A writer returns the prompt, an answer that states how it was found, and the facts that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmspec.zoo.requests.wording import (
    NUMBERS,
    Wording,
    count_things,
    name_of,
    negate,
    relate,
)
from mmspec.zoo.scene import COLOURS, Scene, Thing

Fact = tuple[str, str]
Facts = tuple[Fact, ...]
Answered = tuple[str, str, Facts]
Writer = Callable[[Scene, Wording], Answered]
Remark = Callable[[Thing, Thing, Wording], str]  # on a thing and another one
Solver = Callable[[Scene, Wording], tuple[str, str, str]]  # prompt, steps, answer


def write_short(scene: Scene, say: Wording) -> Answered:
    """Where a thing is, what colour it has, or how two things lie: about 47 words."""
    writers: tuple[Writer, ...] = (_relation, _relation, _place, _colour)
    return writers[say.generator.integers(len(writers))](scene, say)


def write_text(scene: Scene, say: Wording) -> Answered:
    """Which digits are written: about 63 words."""
    digits = [t for t in scene.things if t.digit is not None]
    prompt = say.choose(
        "what is written in the picture?",
        "which digits can you read?",
        "read all digits aloud.",
    )
    if not digits:
        opening = say.choose("i looked at every place.", "let me check the whole picture.")
        seen = _list(say.order(scene.things), say)
        return prompt, f"{opening} {seen} so no digit is written here.", (("digits", ""),)
    found = say.order(digits)
    start = say.choose(
        *("i can read", "the picture shows", "there are written", "one can read"),
        *("we see", "you can find", "i find", "here are"),
    )
    sentences = [f"{start} {count_things(len(found), 'digit')}."]
    for i, thing in enumerate(found):
        sentences.append(_read_digit(i, thing, say))
    values = " ".join(NUMBERS[t.digit] for t in found if t.digit is not None)
    closing = say.choose(
        *("so the text is", "together they read", "in this order i read"),
        *("so all of it is", "in all i read", "this makes the text"),
    )
    return prompt, f"{' '.join(sentences)} {closing} {values}.", (("digits", values),)


def write_caption(scene: Scene, say: Wording) -> Answered:
    """A long caption: about 192 words. Its facts are those of the scene."""
    prompt = say.choose(
        "describe this picture in detail.",
        "write a long caption.",
        "tell me everything about this picture.",
    )
    return prompt, _describe(scene, say, (_beside, _remark)), ()


def write_brief_caption(scene: Scene, say: Wording) -> Answered:
    """A caption of a sentence for each thing, for the first turn of a conversation."""
    prompt = say.choose("what is in this picture?", "please say what you see.")
    return prompt, _describe(scene, say, ()), ()


def write_reasoning(scene: Scene, say: Wording) -> Answered:
    """Count, compare, add or find the outermost, step by step: about 95 words."""
    solvers: list[Solver] = [_count, _compare, _outermost]
    if sum(t.digit is not None for t in scene.things) >= 2:
        solvers += [_sum, _sum]
    prompt, steps, answer = solvers[say.generator.integers(len(solvers))](scene, say)
    opening = say.choose(
        *("let us think step by step.", "i solve it in steps.", "let me think about it slowly."),
        *("here are the steps.", "we look at each thing.", "first i look at every thing."),
    )
    closing = say.choose(
        *("therefore the answer is", "so the answer is", "this means the answer is"),
        *("in the end the answer is", "hence the answer is", "i say that the answer is"),
    )
    return prompt, f"{opening} {steps} {closing} {answer}.", (("final", answer),)


def _pair(scene: Scene, say: Wording) -> tuple[Thing, Thing]:
    first, second = say.generator.choice(len(scene.things), 2, replace=False)
    return scene.things[first], scene.things[second]


def _relation(scene: Scene, say: Wording) -> Answered:
    one, other = _pair(scene, say)
    truth = relate(one, other)
    claim = say.choose(truth, negate(truth))
    word = "yes" if claim == truth else "no"
    prompt = f"is the {name_of(one)} {claim} the {name_of(other)}?"
    closing = say.choose(
        "so it is", "this means that it is", "hence it lies", "therefore it is", "so it lies"
    )
    answer = (
        f"{_look(say)} {_locate(one, say)} {_remark(one, other, say)} {_locate(other, say)} "
        f"{closing} {truth} the "
        f"{name_of(other)}, and the answer is {word}."
    )
    return prompt, answer, (("final", word),)


def _place(scene: Scene, say: Wording) -> Answered:
    thing, other = _pair(scene, say)
    prompt = say.choose(
        f"where is the {name_of(thing)}?", f"in which place is the {name_of(thing)}?"
    )
    return prompt, *_find(thing, other, thing.place, say)


def _colour(scene: Scene, say: Wording) -> Answered:
    thing, other = _pair(scene, say)
    prompt = say.choose(
        f"what colour is the thing at the {thing.place}?",
        f"which colour do you see {thing.place}?",
    )
    return prompt, *_find(thing, other, thing.colour, say)


def _find(thing: Thing, other: Thing, answer: str, say: Wording) -> tuple[str, Facts]:
    """Locate a thing, by itself and beside another, and conclude with the answer."""
    closing = say.choose(
        *("so the answer is", "hence the answer is", "the answer is"),
        *("therefore the answer is", "i say that the answer is", "this means the answer is"),
    )
    text = f"{_look(say)} {_locate(thing, say)} {_beside(thing, other, say)} {closing} {answer}."
    return text, (("final", answer),)


def _look(say: Wording) -> str:
    return say.choose(
        "let me look at the picture.",
        "i look at the picture first.",
        "here is what i see.",
        "first i look closely.",
    )


def _locate(thing: Thing, say: Wording) -> str:
    """One sentence with everything about a thing."""
    where, noun = say.place(thing), say.noun(thing)
    name, size = name_of(thing), say.size(thing)
    return say.lead() + say.choose(
        f"the {noun} is {where}.",
        f"the {noun} lies {where}.",
        f"{where} there is a {noun}.",
        f"there is a {noun} {where}.",
        f"i can see a {noun} {where}.",
        f"we see a {noun} {where}.",
        f"{where} i find a {noun}.",
        f"{where} we can find a {noun}.",
        f"the {name} {where} is {size}.",
        f"the {name} {where} looks {size}.",
        f"the {name}, which is {size}, lies {where}.",
        f"the {name} is a {size} thing {where}.",
    )


def _beside(thing: Thing, other: Thing, say: Wording) -> str:
    """One sentence on how a thing lies to another."""
    where = relate(thing, other)
    seen, name = say.choose("it is", "it lies", "i see it", "you can find it"), name_of(other)
    return say.lead() + say.choose(
        f"{seen} {where} the {name}.",
        f"{where} the {name} {seen}.",
        f"the {name} has it on its {_side(where)} side.",
    )


def _side(where: str) -> str:
    return {"above": "upper", "below": "lower"}.get(where) or where.split()[2]


def _read_digit(i: int, thing: Thing, say: Wording) -> str:
    number = ("first", "second", "third", "fourth", "fifth", "sixth")[i]
    assert thing.digit is not None
    where, size, name = say.place(thing), say.size(thing), name_of(thing)
    return say.lead() + say.choose(
        f"the {number} one is a {size} {name} {where}.",
        f"{where} the {name} is written, and it is {size}.",
        f"the {number} is the {name}, which is {size} {where}.",
        f"i see a {size} {name} {where}.",
        f"there is a {size} {name} {where}.",
        f"{where} i read the {size} {name}.",
        f"i can read the {size} {name} {where}.",
        f"we find the {name} {where}, and it looks {size}.",
    )


def _list(things: Sequence[Thing], say: Wording) -> str:
    return " ".join(_locate(thing, say) for thing in things)


def _describe(scene: Scene, say: Wording, remarks: Sequence[Remark]) -> str:
    """Describe all things in some order, with remarks on each, and a closing sentence."""
    things = say.order(scene.things)
    sentences = [_open(len(things), say)]
    for i, thing in enumerate(things):
        sentences.append(_locate(thing, say))
        sentences += [remark(thing, things[i - 1], say) for remark in remarks]
    sentences.append(_close(things, say))
    return " ".join(sentences)


def _open(number: int, say: Wording) -> str:
    things = count_things(number)
    return say.choose(
        f"this picture shows {things}.",
        f"there are {things} in this picture.",
        f"here we see a board with {things}.",
        f"the picture has {things} in it.",
    )


def _remark(thing: Thing, other: Thing, say: Wording) -> str:
    """One sentence on how a thing looks, by itself or beside another."""
    colour, size = thing.colour, say.size(thing)
    same = "the same colour as" if colour == other.colour else "another colour than"
    return say.lead() + say.choose(
        f"its colour is {colour}, and it looks {size}.",
        f"it looks {size}, and its colour is {colour}.",
        f"somebody made it {size} and {colour}.",
        f"we see that it is {colour} and {size}.",
        f"{size} it is, and its colour is {colour}.",
        f"it has {same} the {name_of(other)}.",
    )


def _close(things: Sequence[Thing], say: Wording) -> str:
    large = sum(t.size == "large" for t in things)
    many, few = NUMBERS[large], NUMBERS[len(things) - large]
    return say.choose(
        f"in all, {many} of them look large and {few} look small.",
        f"in the end, {few} of them look small and {many} look large.",
        "that is everything on the board.",
        "there is nothing else to see.",
    )


def _count(scene: Scene, say: Wording) -> tuple[str, str, str]:
    thing = scene.things[say.generator.integers(len(scene.things))]
    by_colour = say.generator.random() < 0.5
    word = thing.colour if by_colour else thing.size
    if by_colour and say.generator.random() < 0.2:
        word = say.choose(*COLOURS)
    prompt = say.choose(f"how many {word} things are there? explain.", f"count the {word} things.")
    steps, found = [], 0
    for one in say.order(scene.things):
        fits = word in (one.colour, one.size)
        found += fits
        counts = say.choose("counts, which makes", "counts, so there are", "is number", "makes it")
        not_one = say.choose(
            "does not count", "is another thing", "is not what we count", "is not one of them"
        )
        verdict = f"{counts} {NUMBERS[found]}" if fits else not_one
        steps.append(f"{_step(one, say)} {verdict}.")
    return prompt, " ".join(steps), NUMBERS[found]


def _step(thing: Thing, say: Wording) -> str:
    size, colour, name = thing.size, thing.colour, thing.name
    where = say.place(thing)
    return say.lead() + say.choose(
        f"the {size} {colour} {name} {where}",
        f"{where} the {size} {colour} {name}",
        f"the thing {where}, the {size} {colour} {name},",
        f"the {colour} {name} {where}, which is {size},",
        f"i see that the {size} {colour} {name} {where}",
        f"we find that {where} the {size} {colour} {name}",
        f"the {colour} {name}, {size} and {where},",
    )


def _compare(scene: Scene, say: Wording) -> tuple[str, str, str]:
    prompt = say.choose(
        "are there more large or more small things? explain.",
        "compare the number of large and small things.",
    )
    steps, counts = [], {"large": 0, "small": 0}
    for thing in say.order(scene.things):
        counts[thing.size] += 1
        so_far = f"{NUMBERS[counts['large']]} large and {NUMBERS[counts['small']]} small"
        so = say.choose("makes", "makes it", "means that there are", "comes to")
        steps.append(f"{_step(thing, say)} {so} {so_far}.")
    large, small = counts["large"], counts["small"]
    answer = "equal" if large == small else "large" if large > small else "small"
    return prompt, " ".join(steps), answer


def _outermost(scene: Scene, say: Wording) -> tuple[str, str, str]:
    word = say.choose("lowest", "highest")
    best = (
        max(t.row for t in scene.things) if word == "lowest" else min(t.row for t in scene.things)
    )
    group = [t for t in scene.things if t.row == best]
    prompt = say.choose(
        f"how many things lie in the {word} row? explain.",
        f"find the {word} row with a thing in it and count its things.",
    )
    steps = [
        f"{_step(t, say)} {say.choose('is in', 'lies in', 'is a thing of', 'we see in')} row"
        f" {NUMBERS[t.row + 1]}."
        for t in say.order(scene.things)
    ]
    row = f"the {word} row is row {NUMBERS[best + 1]}, and it has {count_things(len(group))}."
    return prompt, f"{' '.join(steps)} {row}", NUMBERS[len(group)]


def _sum(scene: Scene, say: Wording) -> tuple[str, str, str]:
    digits = say.order([t for t in scene.things if t.digit is not None])[:2]
    one, other = digits
    assert one.digit is not None
    assert other.digit is not None
    prompt = say.choose(
        f"add the {name_of(one)} and the {name_of(other)}.",
        f"what is the {name_of(one)} plus the {name_of(other)}? explain.",
    )
    total = NUMBERS[one.digit + other.digit]
    steps = (
        f"{_list(scene.things, say)} {_beside(one, other, say)} "
        f"{NUMBERS[one.digit]} plus {NUMBERS[other.digit]} makes {total}."
    )
    return prompt, steps, total
