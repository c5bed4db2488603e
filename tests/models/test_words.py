"""A draft model whose ids mean other tokens is refused, by the tokenizers that lie beside both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mmspec
from mmspec import zoo
from mmspec.models.words import check_words

Table = dict[str, int]


def folder(path: Path, change: Callable[[Table], Table], added: list[Any] | None = None) -> str:
    """The zoo's tokenizer with another table."""
    made = json.loads((zoo.path("llava") / "tokenizer.json").read_text())
    made["model"]["vocab"] = change(made["model"]["vocab"])
    made["added_tokens"] = made["added_tokens"] if added is None else added
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(made))
    return str(path)


def turned(table: Table) -> Table:
    """As many tokens, behind other ids."""
    return dict(zip(table, reversed(table.values()), strict=True))


def test_an_equal_number_of_other_tokens_is_refused(tmp_path: Path) -> None:
    target, other = str(zoo.path("llava")), folder(tmp_path / "other", turned)
    with pytest.raises(ValueError, match=r"other cannot draft for .*llava: only \d+ of 1\d\d ids"):
        check_words(target, other)
    check_words(target, folder(tmp_path / "same", dict))
    check_words(target, folder(tmp_path / "spaced", lambda table: dict(reversed(table.items()))))


def test_a_model_from_such_a_folder_cannot_draft(tmp_path: Path) -> None:
    """Given as an object and by name; the vocabularies are equal."""
    target, small = zoo.load("llava"), zoo.load("llava-drafter")
    small.save_pretrained(tmp_path / "whole")
    table = folder(tmp_path / "other", turned)
    (Path(table) / "tokenizer.json").rename(tmp_path / "whole" / "tokenizer.json")
    own = small.config._name_or_path
    try:
        small.config._name_or_path = str(tmp_path / "whole")
        for drafter in (small, str(tmp_path / "whole")):
            with pytest.raises(ValueError, match="choose a draft model with the target's token"):
                mmspec.accelerate(target, "coupled", drafter=drafter)
    finally:
        small.config._name_or_path = own
    mmspec.accelerate(target, "coupled", drafter=small)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"vocab": 5}}'])
def test_what_tells_nothing_refuses_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    check_words(str(zoo.path("llava")), str(tmp_path))
    check_words(str(zoo.path("llava")), "some/name")
    check_words("", str(tmp_path))
