"""How training tells what it does."""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str, int, int, float], None]  # (stage, step, steps, loss)


def silent(stage: str, step: int, steps: int, loss: float) -> None:
    """Report nothing."""
