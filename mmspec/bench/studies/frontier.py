"""The frontier of lossy sampling in steps: network calls against the distance of the images.

Every lossy recipe runs at several values of one option, beside plain sampling in fewer steps. A
recipe earns its place where plain sampling with no more work is farther from the images of all
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmspec.accelerated import Accelerated
from mmspec.bench.compare import compare
from mmspec.bench.reporting import PointTable, Progress, silent
from mmspec.bench.row import Row
from mmspec.bench.studies.sweep import SweptOption, make_option
from mmspec.modality import Workload
from mmspec.verifiers.tolerance_window import ToleranceWindow

PLAIN = "fewer steps"

LATENT_OPTIONS: Mapping[str, SweptOption] = {
    "taylorseer": make_option("interval", 2, 3, 4, 6),
    "taylorseer, lite": SweptOption(
        "interval", (2, 3, 4, 6), lambda value: {"interval": value, "lite": True}
    ),
    "speca": SweptOption(
        "base", (0.05, 0.1, 0.3, 1.0), lambda value: {"base": value, "floor": value / 3}
    ),
    "first-block-cache": make_option("threshold", 0.05, 0.1, 0.15, 0.2, 0.3),
    "sea-cache": make_option("threshold", 0.05, 0.1, 0.2, 0.4),
    "tea-cache": make_option("threshold", 0.05, 0.1, 0.2, 0.4),
    "mag-cache": make_option("threshold", 0.02, 0.05, 0.1, 0.2),
    "deep-cache": make_option("interval", 2, 3, 5),
    "deep-cache, depth 2": SweptOption(
        "interval", (2, 3, 5), lambda value: {"interval": value, "depth": 2}
    ),
    "pab": make_option("spatial", 2, 3, 4),
    "paradigms": SweptOption(
        "tolerance", (0.02, 0.1, 0.5), lambda value: {"verifier": ToleranceWindow(value)}
    ),
}
LATENT_RECIPES = tuple(dict.fromkeys(name.partition(",")[0] for name in LATENT_OPTIONS))


@dataclass(frozen=True)
class FrontierPoint:
    """A recipe with its option at one value, or plain sampling in `value` steps."""

    recipe: str
    option: str
    value: float
    row: Row
    work: float | None  # operations of the network, as a share of plain sampling
    distance: float | None  # PSNR on ink to the images of all steps, decibel; None = equal images
    beaten_by: int | None = None  # steps of plain sampling that do no more and come nearer

    def flat(self) -> dict[str, Any]:
        """Return one table row."""
        qualities = {name: one["value"] for name, one in self.row.qualities.items()}
        return {
            **{"recipe": self.recipe, "option": self.option, "value": self.value},
            **{"calls": self.row.calls, "work": self.work, "beaten_by": self.beaten_by},
            **{"speedup": self.row.speedup_end_to_end, **qualities},
        }


@dataclass(frozen=True)
class Frontier(PointTable):
    """The report of `mmspec bench sweep` for models that sample in steps."""

    model: str
    points: list[FrontierPoint]
    steps: float  # of plain sampling
    settings: dict[str, Any]
    requests: int
    left_out: dict[str, str]  # recipes that do not fit, and why
    environment: dict[str, Any] = field(default_factory=dict)


def measure_frontier(
    recipes: Sequence[str],
    accelerated: Callable[..., Accelerated],
    workload: Workload,
    *,
    model: str = "model",
    repeats: int = 1,
    seed: int = 0,
    progress: Progress = silent,
) -> Frontier:
    """Measure lossy recipes at every value of their option; `accelerated(recipe, **parts)` binds.

    Raises ValueError if no recipe fits.
    """
    wanted = [name for name in LATENT_OPTIONS if name.partition(",")[0] in recipes]
    unknown = [one for one in recipes if not any(one == n.partition(",")[0] for n in wanted)]
    if unknown or not wanted:
        raise ValueError(
            f"{', '.join(unknown)}: no option is known; recipes with one: "
            f"{', '.join(LATENT_OPTIONS)}"
        )
    ways, left_out = dict[str, Accelerated](), dict[str, str]()
    for name in wanted:
        for value in LATENT_OPTIONS[name].values:
            parts = LATENT_OPTIONS[name].parts(value)
            try:
                ways[f"{name} {value:g}"] = accelerated(name.partition(",")[0], **parts)
            except ValueError as error:
                left_out[name] = str(error)
    if not ways:
        raise ValueError(f"no recipe fits; the first: {next(iter(left_out.values()))}")
    plain = {f"{PLAIN} {steps}": runner for steps, runner in workload.fewer_steps.items()}
    beside = replace(workload, peers=lambda *given: (plain, {}))
    found = compare(
        model, ways, beside, repeats=repeats, seed=seed, efficiency=False, progress=progress
    )
    skipped = {row.recipe.rpartition(" ")[0]: row.skipped for row in found.baselines if row.skipped}
    return Frontier(
        model=model,
        points=_make_points([*found.rows, *found.baselines[1:]], found.baselines[0], wanted),
        steps=found.baselines[0].calls or 0.0,
        settings=found.settings,
        requests=found.requests,
        left_out={**left_out, **{name: why for name, why in skipped.items() if why}},
        environment=found.environment,
    )


def _make_points(rows: Sequence[Row], own: Row, wanted: Sequence[str]) -> list[FrontierPoint]:
    """The points of all rows that ran, with `own` as plain sampling in all steps."""
    swept = {name: LATENT_OPTIONS[name].name for name in wanted} | {PLAIN: "steps"}
    named = [(*row.recipe.rpartition(" ")[::2], row) for row in rows if not row.skipped]
    made = [
        FrontierPoint(name, swept[name], float(value), row, _work(row, own), _distance(row))
        for name, value, row in named
        if name in swept
    ]
    plain = [one for one in made if one.recipe == PLAIN]
    return [replace(one, beaten_by=_find_better(one, plain)) for one in made]


def _work(row: Row, own: Row) -> float | None:
    """Share of operations; rows of the network where operations are not counted."""
    skipped = row.extras.get("skipped work")
    if skipped is not None:
        return 1 - float(skipped)
    return None if not own.network_rows else (row.network_rows or 0.0) / own.network_rows


def _distance(row: Row) -> float | None:
    found = row.qualities.get("psnr_on_ink") or row.qualities.get("psnr") or {}
    return found.get("value")


def _find_better(one: FrontierPoint, plain: Sequence[FrontierPoint]) -> int | None:
    """The fewest steps of plain sampling with no more work and a higher PSNR."""
    if one.recipe == PLAIN or one.work is None:
        return None
    mine = math.inf if one.distance is None else one.distance
    better = [
        int(other.value)
        for other in plain
        if (other.work or 1.0) <= one.work and (other.distance or math.inf) > mine
    ]
    return min(better, default=None)
