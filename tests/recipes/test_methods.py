"""The table of methods names recipes that exist, and says something about every method."""

from __future__ import annotations

import re
from pathlib import Path

from mmspec import recipes

TABLE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "methods.md"
ROWS = re.findall(r"^\| (?!method|---)(.+?) \| (.*?) \|$", TABLE.read_text(), re.MULTILINE)


def test_every_method_has_a_recipe_or_a_reason() -> None:
    assert len(ROWS) > 60
    for method, answer in ROWS:
        named = re.findall(r"`([a-z0-9-]+)`", answer)
        assert set(named) <= set(recipes.names()), method
        assert named or len(answer) > 5, method
    methods = [method for method, _ in ROWS]
    assert len(methods) == len(set(methods))
