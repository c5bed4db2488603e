"""Texts are read once, found again when rows move, and dropped when they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmspec_vllm.texts import IGNORED, PATIENCE, Texts


class Counter:
    """Counts the tokens read."""

    total = 0

    def __init__(self) -> None:
        self.num_read = 0

    def read(self, text: Sequence[int]) -> None:
        Counter.total += len(text) - self.num_read
        self.num_read = len(text)


def rows(**texts: list[int]) -> dict[int, Any]:
    return {int(name[1:]): np.array(text, dtype=np.int32) for name, text in texts.items()}


def texts(limit: int = 4) -> Texts[Counter]:
    Counter.total = 0
    return Texts(Counter, lambda token: token == 9, limit)


def test_a_text_is_read_once_wherever_its_row_goes() -> None:
    made = texts()
    first = made.match(rows(r0=[1, 2, 3], r1=[4, 9, 6]))
    assert first[1].tokens == [4, IGNORED, 6]
    moved = made.match(rows(r0=[4, 9, 6, 7], r1=[1, 2, 3], r3=[1]))
    assert (moved[0], moved[1]) == (first[1], first[0])
    assert moved[0].tokens == [4, IGNORED, 6, 7]
    assert Counter.total == 3 + 3 + 1 + 1


def test_rows_with_the_same_text_have_one_text_each() -> None:
    made = texts()
    both = made.match(rows(r0=[1, 2], r1=[1, 2]))
    assert both[0] is not both[1]
    later = made.match(rows(r0=[1, 2, 5], r1=[1, 2, 6]))
    assert [later[0].tokens, later[1].tokens] == [[1, 2, 5], [1, 2, 6]]
    assert Counter.total == 6


def test_a_text_is_continued_by_one_row_alone() -> None:
    made = texts()
    old = made.match(rows(r0=[1, 2]))[0]
    made.match({})
    both = made.match(rows(r1=[1, 2, 3], r2=[1, 2, 4]))
    assert both[1] is old
    assert both[2] is not old
    assert [both[1].tokens, both[2].tokens] == [[1, 2, 3], [1, 2, 4]]


def test_a_row_reused_by_another_request_is_read_anew() -> None:
    made = texts()
    old = made.match(rows(r0=[1, 2, 3]))[0]
    new = made.match(rows(r0=[1, 5, 3, 4]))[0]
    assert new is not old
    assert new.tokens == [1, 5, 3, 4]


def test_a_shorter_row_is_another_text() -> None:
    made = texts()
    old = made.match(rows(r0=[1, 2, 3]))[0]
    assert made.match(rows(r0=[1, 2]))[0] is not old


def test_the_longest_text_that_fits_is_continued() -> None:
    made = texts()
    old = made.match(rows(r0=[1, 2], r1=[1, 2, 3]))
    made.match({})
    assert made.match(rows(r4=[1, 2, 3, 4]))[4] is old[1]


def test_texts_without_a_row_wait_and_are_dropped() -> None:
    made = texts()
    old = made.match(rows(r0=[1, 2, 3]))[0]
    for _ in range(PATIENCE - 1):
        made.match(rows(r1=[8]))
    assert made.match(rows(r0=[1, 2, 3]))[0] is old
    for _ in range(PATIENCE):
        made.match({})
    assert not made.waiting
    assert not made.by_row
    assert made.match(rows(r0=[1, 2, 3]))[0] is not old


def test_few_texts_wait_at_once() -> None:
    made = texts(limit=4)
    for step in range(12):
        made.match(rows(r0=[10 + step, 1], r1=[10 + step, 2], r2=[10 + step, 3]))
        assert len(made.waiting) <= 4
    assert [text.tokens for text in made.waiting] == [[19, 3], [20, 1], [20, 2], [20, 3]]
