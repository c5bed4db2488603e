"""What the training of every checkpoint shares: short trials, and the checkpoint learnt from."""

from __future__ import annotations

from pathlib import Path

from mmspec.zoo import catalogue


def cut(planned: int, steps: int | None) -> int:
    """As planned, or at most `steps`."""
    return planned if steps is None else min(planned, steps)


def written(name: str) -> Path:
    """The folder of a checkpoint that others learn from. Raises ValueError where there is none."""
    folder = catalogue.path(name)
    if not catalogue.is_present(name):
        raise ValueError(f"{name} is not in {folder.parent}, and this one learns from it; train it")
    return folder
