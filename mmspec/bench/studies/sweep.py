"""Measure relaxed recipes over their relaxation parameters: speed against quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.accelerated import Accelerated
from mmspec.bench.compare import compare
from mmspec.bench.reporting import PointTable, Progress, silent
from mmspec.bench.row import Row
from mmspec.modality import Workload
from mmspec.verifiers.lenience import Lenience
from mmspec.verifiers.recursive import Recursive


@dataclass(frozen=True)
class SweptOption:
    """A relaxation parameter; its first value is exact, or closest to it."""

    name: str
    values: tuple[float, ...]
    parts: Callable[[float], dict[str, Any]]  # as `accelerate` takes them


def make_option(name: str, *values: float) -> SweptOption:
    """An option of a recipe, at the values of a sweep."""
    return SweptOption(name, values, lambda value: {name: value})


RADII = (0, 5, 9, 15, 25, 40, 64)  # bins of 256; published tolerances are 9 to 15
OPTIONS: Mapping[str, SweptOption] = {
    "gsd": SweptOption(  # by rank alone, as distances of codes depend on the embedding
        "size", (0, 3, 10, 25, 50), lambda size: {"size": size, "distance": math.inf}
    ),
    "sjd-pp": SweptOption(
        "tau", (math.inf, 4.0, 2.0, 1.0, 0.5), lambda tau: {"tau": tau, "reuse": "published"}
    ),
    "zipar": make_option("window", 9, 7, 5, 4, 3, 2),
    "vvs": make_option("interval", 20, 10, 5, 3, 2),
    "lantern": make_option("delta", 0.0, 0.05, 0.1, 0.2, 0.4, 0.8),
    "lantern-pp": make_option("factor", 1.0, 2.0, 5.0, 10.0, 20.0),
    "cool-sd": make_option("delta", 1.0, 1.1, 1.5, 2.0, 4.0),
    "lenience": SweptOption(
        "ell", (1.0, 0.8, 0.6, 0.4, 0.2), lambda ell: {"verifier": Recursive(Lenience(ell))}
    ),
    "hold-last-tolerance": make_option("radius", *RADII),
    "spec-vla": make_option("radius", *RADII),
    "oft-draft-tolerance": make_option("radius", *RADII),
}


COLUMNS = (  # of a row, in a table of points
    *("fewer_calls", "fewer_calls_error", "speedup_over_plain", "mean_acceptance_length"),
    *("distance", "unverified_share"),
)


@dataclass(frozen=True)
class SweepPoint:
    """One recipe with its option at one value.

    `toy_distance` is the total variation of a tiny model's whole output, by enumeration.
    """

    recipe: str
    option: str
    value: float
    row: Row
    toy_distance: float | None

    def flat(self) -> dict[str, Any]:
        """Return one table row."""
        minimum, maximum = self.row.spread["speedup_over_plain"]
        qualities = {
            f"{name} {key}".removesuffix(" value"): value
            for name, quality in self.row.qualities.items()
            for key, value in quality.items()
        }
        return {
            "recipe": self.recipe,
            "option": self.option,
            "value": self.value,
            **{name: getattr(self.row, name) for name in COLUMNS},
            "speedup_least": minimum,
            "speedup_most": maximum,
            "toy_distance": self.toy_distance,
            **qualities,
            **flatten(self.row.extras),
        }


def flatten(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a modality as numbers: {"a": {"b": 1}} is {"a b": 1}."""
    made = dict[str, Any]()
    for name, value in extras.items():
        parts = value if isinstance(value, Mapping) else {"": value}
        made |= {f"{name} {key}".strip(): one for key, one in parts.items()}
    return made


@dataclass(frozen=True)
class Sweep(PointTable):
    """The report of `mmspec bench sweep`. `plain` has one row per recipe, measured with it."""

    model: str
    points: list[SweepPoint]
    plain: list[Row]
    settings: dict[str, Any]
    requests: int
    repeats: int
    judged: int
    environment: dict[str, Any] = field(default_factory=dict)


def sweep(
    recipes: Sequence[str],
    accelerated: Callable[..., Accelerated],
    workload: Workload,
    *,
    model: str = "model",
    repeats: int = 3,
    seed: int = 0,
    progress: Progress = silent,
) -> Sweep:
    """Measure recipes at every value of a parameter; `accelerated(recipe, **parts)` binds them.

    All values of a recipe are timed in one benchmark, with plain decoding. Raises ValueError for
    recipes without one.
    """
    unknown = [name for name in recipes if name not in OPTIONS]
    if unknown or not recipes:
        raise ValueError(
            f"{', '.join(unknown)}: no parameter to sweep; recipes with one: {', '.join(OPTIONS)}"
        )
    alone = replace(workload, baselines={}, peers=None)
    points: list[SweepPoint] = []
    plain: list[Row] = []
    for name in recipes:
        option = OPTIONS[name]
        ways = {str(value): accelerated(name, **option.parts(value)) for value in option.values}
        found = compare(
            model, ways, alone, repeats=repeats, seed=seed, efficiency=False, progress=progress
        )
        plain.append(found.rows[0])
        for value, row in zip(option.values, found.rows[1:], strict=True):
            toy = workload.tiny_model_distance
            distance = None if toy is None else toy(name, option.parts(value))
            points.append(SweepPoint(name, option.name, value, row, distance))
    return Sweep(
        model=model,
        points=points,
        plain=plain,
        settings=found.settings,
        requests=found.requests,
        repeats=repeats,
        judged=found.judged,
        environment=found.environment,
    )
