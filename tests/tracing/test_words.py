"""Words as they continue the text, for tokenizers that split characters and drop spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.tracing.words import Words, add_text


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Pieces:
    """A tokenizer that joins words by spaces, as one of whole words does."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(("a", "red", "circle", ".")[one] for one in ids).replace(" .", ".")


def test_a_split_character_is_shown_where_it_ends() -> None:
    text = "a \u00e9 \U0001f600!"
    found = [*Words(Bytes()).spell(text.encode())]
    assert "".join(found) == text
    assert found[:4] == ["a", " ", "", "\u00e9"]


def test_words_bring_their_spaces() -> None:
    ids = [0, 1, 2, 3, 0, 1, 2, 3]
    words = Words(Pieces())
    assert "".join(words.spell(ids)) == Pieces().decode(ids)
    assert [*words.spell([2, 3], [0, 1])] == [" circle", "."]
    assert words.spell_after(1, 2) == " circle"
    assert words.spell_after(None, 2) == "circle"


def test_drafts_continue_their_parents() -> None:
    row: dict[str, Any] = {"tokens": [1, 2], "draft": [1, 3, 2], "parents": [-1, -1, 0]}
    first: dict[str, Any] = {"tokens": [0], "draft": [], "parents": []}
    rounds = [{"part": 0, "rows": [first]}, {"part": 0, "rows": [row]}]
    add_text(rounds, Pieces())
    assert first["text"] == ["a"]
    assert row["text"] == [" red", " circle"]
    assert row["draft_text"] == [" red", ".", " circle"]
