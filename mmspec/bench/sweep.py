"""Relaxed recipes over their knobs: what is gained, and what it costs in how many ways."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mmspec import recipes
from mmspec.api import Accelerated
from mmspec.bench.certify_images import tiny_pair
from mmspec.bench.gallery import Gallery
from mmspec.bench.images import ImageRow, compare_images
from mmspec.bench.progress import Progress, silent
from mmspec.bench.tiny_images import CELLS, table, tiny_painter
from mmspec.draft import Kind
from mmspec.recipe import Recipe
from mmspec.trees import Tree
from mmspec.verifiers.annealed import Annealed
from mmspec.verifiers.law import ancestral, joint
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.recursive import Recursive


@dataclass(frozen=True)
class Knob:
    """What makes a recipe more or less relaxed; the first value is the exact one, or nearest."""

    name: str
    values: tuple[float, ...]
    parts: Callable[[float], dict[str, Any]]  # as `accelerate` takes them


def _option(name: str, *values: float) -> Knob:
    return Knob(name, values, lambda value: {name: value})


KNOBS: Mapping[str, Knob] = {
    "gsd": _option("size", 0, 3, 10, 25, 50),
    "sjd-pp": Knob(
        "tau", (math.inf, 4.0, 2.0, 1.0, 0.5), lambda tau: {"tau": tau, "reuse": "published"}
    ),
    "zipar": _option("window", 9, 7, 5, 4, 3, 2),
    "vvs": _option("interval", 20, 10, 5, 3, 2),
    "lantern": _option("delta", 0.0, 0.05, 0.1, 0.2, 0.4, 0.8),
    "lantern-pp": _option("factor", 1.0, 2.0, 5.0, 10.0, 20.0),
    "cool-sd": Knob(
        "delta",
        (1.0, 1.1, 1.5, 2.0, 4.0),
        lambda delta: {"verifier": Recursive(Annealed(delta, nu=0.7 if delta > 1 else 0.0))},
    ),
    "lenience": Knob(
        "ell", (1.0, 0.8, 0.6, 0.4, 0.2), lambda ell: {"verifier": Recursive(Lenience(ell))}
    ),
}


@dataclass(frozen=True)
class Point:
    """One recipe with its knob at one value; columns as in `ImageRow`."""

    recipe: str
    knob: str
    value: float
    fewer_calls: float
    speedup_over_plain: float
    speedup_least: float
    speedup_most: float
    mean_acceptance_length: float
    over_accepted_mass: float | None  # per code, on the model
    tiny_distance: float | None  # total variation of a whole tiny picture, enumerated
    facts_right: float | None
    facts_gap: float | None
    facts_gap_error: float | None
    log_likelihood: float
    log_likelihood_error: float


@dataclass(frozen=True)
class Sweep:
    """What `mmspec bench sweep` reports. `plain` has one row per recipe: it was raced with each."""

    model: str
    points: list[Point]
    plain: list[ImageRow]
    settings: dict[str, Any]
    requests: int
    repeats: int
    pictures: int
    environment: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    def write_csv(self, file: Path) -> None:
        """One line per point."""
        with file.open("w", newline="") as opened:
            lines = csv.DictWriter(opened, [column.name for column in fields(Point)])
            lines.writeheader()
            lines.writerows(asdict(point) for point in self.points)


def sweep(
    chosen: Sequence[str],
    accelerated: Callable[..., Accelerated],
    gallery: Gallery,
    settings: Mapping[str, Any],
    *,
    model: str = "model",
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = silent,
) -> Sweep:
    """Measure recipes at every value of their knobs; `accelerated(recipe, **parts)` binds them.

    All values of a recipe are raced together, with plain decoding. Raises ValueError for a recipe
    without a knob.
    """
    unknown = [name for name in chosen if name not in KNOBS]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no knob is known; recipes with one: {', '.join(KNOBS)}"
        )
    points: list[Point] = []
    plain: list[ImageRow] = []
    found = None
    for name in chosen:
        knob = KNOBS[name]
        ways = {str(value): accelerated(name, **knob.parts(value)) for value in knob.values}
        found = compare_images(
            ways,
            gallery,
            settings,
            model=model,
            repeats=repeats,
            seed=seed,
            peers=False,
            efficiency=False,
            progress=progress,
        )
        plain.append(found.rows[0])
        for value, row in zip(knob.values, found.rows[1:], strict=True):
            points.append(_point(name, knob, value, row))
    assert found is not None
    return Sweep(
        model=model,
        points=points,
        plain=plain,
        settings=dict(settings),
        requests=found.requests,
        repeats=repeats,
        pictures=found.pictures,
        environment=found.environment,
    )


def tiny_distance(plan: Recipe) -> float | None:
    """How far one round takes the law of a tiny picture of four codes, by trying everything.

    Total variation between the picture's law and the target's, the draft being a chain of all but
    the last code from another tiny model. None where the loss is not in what the verifier decides.
    """
    if plan.verifier.lossless or plan.gate is not None or Kind.RACE in plan.verifier.kinds[:1]:
        return None
    p, q = table(tiny_painter(seed=0)), table(tiny_painter(layers=1, seed=1))
    verifier = plan.verifier
    found = joint(p, q, verifier, Tree.chain(CELLS - 1), verifier.kinds[0])
    return float((found - ancestral(p, CELLS)).abs().sum() / 2)


def _point(name: str, knob: Knob, value: float, row: ImageRow) -> Point:
    tiny = tiny_pair(recipes.get(name), 0, **knob.parts(value))
    least, most = row.spread["plain"]
    return Point(
        recipe=name,
        knob=knob.name,
        value=value,
        fewer_calls=row.fewer_calls,
        speedup_over_plain=row.speedup_over_plain,
        speedup_least=least,
        speedup_most=most,
        mean_acceptance_length=row.mean_acceptance_length,
        over_accepted_mass=row.over_accepted_mass,
        tiny_distance=tiny_distance(tiny.recipe),
        facts_right=row.facts_right,
        facts_gap=row.facts_gap,
        facts_gap_error=row.facts_gap_error,
        log_likelihood=row.log_likelihood,
        log_likelihood_error=row.log_likelihood_error,
    )
