"""What benchmarks of pictures draw, and how many of the facts asked for are in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from PIL import Image

from mmspec.bench.progress import Progress
from mmspec.bench.turns import Drawn, Laps, Player

Facts = Sequence[tuple[int, int]] | None  # right and asked, of each picture; None = no judge
Judge = Callable[[Sequence[Image.Image]], list[tuple[int, int]]]


@dataclass(frozen=True)
class Gallery:
    """What is drawn: requests that are timed, and others whose pictures are judged.

    Requests are arguments of `generate_images`. Quality needs many more pictures than time does, so
    those in `judged` are drawn once and in larger batches; without any, the timed ones count.
    """

    timed: Sequence[Mapping[str, Any]]
    judged: Sequence[Mapping[str, Any]] = ()
    judge: Judge | None = None  # of the judged pictures, in order

    @property
    def shown(self) -> Sequence[Mapping[str, Any]]:
        return self.judged or self.timed


def pictures_to_judge(
    players: Mapping[str, Player],
    laps: Mapping[str, Laps],
    gallery: Gallery,
    seed: int,
    progress: Progress,
) -> dict[str, list[Drawn]]:
    """The pictures to judge, of everybody who is still there."""
    if not gallery.judged:
        return {name: lap.drawn for name, lap in laps.items()}
    made: dict[str, list[Drawn]] = {name: [] for name in laps}
    for index, asked in enumerate(gallery.judged):
        for name, drawn in made.items():
            drawn.append(players[name].draw(asked, seed + 1000 + index))
        progress("draw for the judge", index + 1, len(gallery.judged))
    return made


def facts_of(gallery: Gallery, drawn: Sequence[Drawn]) -> Facts:
    """Of the pictures that were drawn for the judge, if there is one."""
    if gallery.judge is None:
        return None
    return gallery.judge([picture for one in drawn for picture in one.pictures.images])


def share(facts: Facts) -> float | None:
    """How many of all facts asked for are right."""
    return None if facts is None else sum(r for r, _ in facts) / sum(asked for _, asked in facts)


def gap(facts: Facts, base: Facts) -> tuple[float | None, float | None]:
    """How many more of the facts are right than in plain's pictures, and its standard error."""
    if facts is None or base is None:
        return None, None
    asked = sum(total for _, total in facts)
    gaps = [float(mine[0] - other[0]) for mine, other in zip(facts, base, strict=True)]
    return sum(gaps) / asked, error(gaps) * len(gaps) / asked


def error(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
