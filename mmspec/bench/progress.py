"""How long work tells that it moves on."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (stage, done, total)


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
