"""Charts of the Scene world: columns of equal things, read as bars of whole numbers."""

from __future__ import annotations

import numpy as np

from mmspec.zoo.requests.answers import Answered
from mmspec.zoo.requests.wording import NUMBERS, Wording
from mmspec.zoo.scene import BOARD, COLOURS, SHAPES, Scene, Thing

_COLUMNS = ("left", "center", "right")
_SHIFT = 0.06  # maximum displacement from the middle of a cell, in cells


def sample_chart(generator: np.random.Generator) -> Scene:
    """Sample a chart: three columns of one shape, each in its colour, 0 to 3 things high.

    One column is higher than the others.
    """
    heights = [0, 0, 0]
    while heights.count(max(heights)) != 1:
        heights = [int(n) for n in generator.integers(BOARD + 1, size=len(_COLUMNS))]
    shape = SHAPES[generator.integers(len(SHAPES))]
    colours = generator.permutation(len(COLOURS))
    things = []
    for row in range(BOARD):
        for column, height in enumerate(heights):
            if row >= BOARD - height:
                x, y = (float(v) for v in generator.uniform(-_SHIFT, _SHIFT, 2))
                colour = COLOURS[colours[column]]
                things.append(Thing(shape, colour, "large", row, column, shift=(x, y)))
    return Scene(tuple(things))


def write_chart(scene: Scene, say: Wording) -> Answered:
    """Read a chart and say which column is the highest, the lowest or their total: 69 words."""
    heights = [sum(t.column == i for t in scene.things) for i in range(len(_COLUMNS))]
    sentences = [_open(scene, say)]
    order = say.generator.permutation(len(_COLUMNS))
    sentences += [_read_column(scene, int(i), say) for i in order]
    question = say.choose("highest", "total")
    if question == "highest":
        prompt = say.choose("which column of the chart is highest?", "read the chart: which wins?")
        best = heights.index(max(heights))
        others = [heights[i] for i in range(len(heights)) if i != best]
        sentences.append(_compare(best, heights[best] - max(others), say))
        answer = _COLUMNS[best]
    else:
        prompt = say.choose("what is the total of the chart?", "add the columns of the chart.")
        steps = " plus ".join(NUMBERS[height] for height in heights)
        answer = NUMBERS[sum(heights)]
        total = say.choose("makes", "comes to", "is", "makes in all")
        sentences.append(f"{say.lead()}{steps} {total} {answer}.")
    closing = say.choose(
        *("so the answer is", "therefore the answer is", "hence the answer is"),
        *("this means the answer is", "i say that the answer is", "in the end the answer is"),
    )
    facts = tuple((f"{name} column", NUMBERS[heights[i]]) for i, name in enumerate(_COLUMNS))
    return prompt, f"{' '.join(sentences)} {closing} {answer}.", (*facts, ("final", answer))


def _open(scene: Scene, say: Wording) -> str:
    shape = scene.things[0].shape
    return say.choose(
        f"this is a chart with three columns, drawn with a {shape} for each unit.",
        f"the chart has three columns, and each {shape} in it is one unit.",
        f"here is a chart of three columns, where one {shape} means one unit.",
        f"we see three columns, and in each of them a {shape} is one unit.",
        f"the picture shows a chart of three columns, which count in units of one {shape}.",
        f"i see a chart, and the three columns in it are made of a {shape} for each unit.",
    )


def _read_column(scene: Scene, column: int, say: Wording) -> str:
    things = [t for t in scene.things if t.column == column]
    name, number = f"the {_COLUMNS[column]} column", NUMBERS[len(things)]
    if not things:
        return say.lead() + say.choose(
            f"{name} is empty, that is zero.",
            f"in {name} there is nothing: zero.",
            f"nothing is in {name}, so it has zero.",
        )
    colour, is_one = things[0].colour, len(things) == 1
    noun = say.choose("unit", "unit", "thing") + ("" if is_one else "s")
    seen = say.choose("i count", "i can see", "we see", "we find", "i read", "you can read")
    return say.lead() + say.choose(
        f"{name} is {colour} and has {number} {noun}.",
        f"in {name} {seen} {number} {noun}, all of them {colour}.",
        f"{seen} {number} {noun} in {name}, and it is {colour}.",
        f"{name}, which is {colour}, goes up to {number} {noun}.",
        f"for {name} {seen} {number} {noun} in {colour}.",
        f"{colour} is {name}, with {number} {noun}.",
        f"{seen} {number} {colour} {noun} for {name}.",
    )


def _compare(best: int, lead: int, say: Wording) -> str:
    name, more = f"the {_COLUMNS[best]} column", NUMBERS[lead]
    return say.lead() + say.choose(
        f"{name} is higher than both others, by at least {more}.",
        f"no other column is as high as {name}, which leads by {more}.",
        f"comparing all three, {name} is the highest, and {more} more than the next.",
        f"the highest of them is {name}, and it leads by {more}.",
        f"both others are lower than {name}, by {more} or more.",
        f"we find that {name} goes up to the highest place, {more} above the next.",
    )
