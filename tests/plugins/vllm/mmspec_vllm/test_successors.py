"""Successors are those of the text last read."""

from __future__ import annotations

from mmspec_vllm.successors import Successors
from mmspec_vllm.texts import IGNORED


def test_the_prompt_counts_only_where_asked() -> None:
    for prompts, expected in ((False, {3: 4}), (True, {1: 2, 2: 3, 3: 4})):
        successors = Successors({}, prompts)
        successors.read([1, 2, 3, 4])
        assert successors.table == expected


def test_each_token_is_read_once_and_the_last_successor_counts() -> None:
    successors = Successors({})
    for text in ([1, 2], [1, 2, 1, 3], [1, 2, 1, 3]):
        successors.read(text)
    assert successors.table == {1: 3, 2: 1}
    successors.table.clear()
    successors.read([1, 2, 1, 3, 4])
    assert successors.table == {3: 4}


def test_nothing_follows_or_precedes_an_ignored_id() -> None:
    successors = Successors({}, prompts=True)
    successors.read([1, IGNORED, 2, 3])
    assert successors.table == {2: 3}


def test_a_chain_ends_where_nothing_is_known_or_at_its_length() -> None:
    successors = Successors({1: 2, 2: 3, 5: 5})
    assert successors.follow(1, 4) == [2, 3]
    assert successors.follow(1, 1) == [2]
    assert successors.follow(5, 4) == [5] * 4
    assert successors.follow(9, 4) == []
    successors.read([7])  # a text of one token has no transition
    assert 7 not in successors.table
