"""The API reference is what the docstrings say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mmspec
from tools import api_reference

MADE = api_reference.pages()
STALE = f"run `{api_reference.COMMAND}` and commit the pages"


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.stem)
def test_a_page_is_made_from_the_docstrings(path: Path) -> None:
    assert path.is_file(), STALE
    assert path.read_text(encoding="utf-8") == MADE[path], STALE


def test_no_other_page_is_there() -> None:
    assert set(api_reference.PAGES.glob("*.md")) <= set(MADE), STALE


def test_all_public_names_are_in_the_reference() -> None:
    named = set(re.findall(r"^### (\w+)$", MADE[api_reference.INDEX], re.MULTILINE))
    folders = {name for name in mmspec.__all__ if hasattr(getattr(mmspec, name), "__path__")}
    assert named == set(mmspec.__all__) - folders


def test_a_docstring_becomes_markdown() -> None:
    text = """Draw *one* token.

    A tree:

        root
          leaf

    Args:
        scores: Logits,
            any shape.

    Example:
        >>> draw(scores)
    """
    assert api_reference._markdown(text).split("\n\n") == [
        r"Draw \*one\* token.",
        "A tree:",
        "```text\nroot\n  leaf\n```",
        "**Args**",
        "- `scores`: Logits,\n  any shape.",
        "**Example**",
        "```pycon\n>>> draw(scores)\n```",
    ]
