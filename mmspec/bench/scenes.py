"""Pictures of the Scene world on order: prompts in batches, and a judge that counts facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mmspec.zoo.prompts import prompts
from mmspec.zoo.reading import read_all, score_picture
from mmspec.zoo.scene import Scene

T = TypeVar("T")


def from_zoo(count: int, batch: int, seed: int) -> tuple[list[list[str]], list[Scene]]:
    """DraftedCode-out prompts in whole batches, and the scenes that they describe."""
    groups = grouped(prompts(count, seed=seed), batch)
    scenes = [one.scene for group in groups for one in group]
    return [[one.text for one in group] for group in groups], scenes


def grouped(items: Sequence[T], batch: int) -> list[list[T]]:
    """Whole batches; what is left over is left out."""
    return [list(items[at : at + batch]) for at in range(0, len(items) - batch + 1, batch)]


def facts(scenes: Sequence[Scene], pictures: Sequence[Any]) -> list[tuple[int, int]]:
    """Facts right and facts asked of every picture."""
    shown = read_all(pictures)
    return [score_picture(scene, one) for scene, one in zip(scenes, shown, strict=True)]


def facts_right(scenes: Sequence[Scene], drawn: Iterable[Iterable[Any]]) -> float:
    """The share of facts right, over batches of pictures together."""
    scored = facts(scenes, [picture for pictures in drawn for picture in pictures])
    return sum(right for right, _ in scored) / sum(asked for _, asked in scored)
